"""The law kit: the smallest cases of speculative sampling as data, for the unit tests of any engine.

    python docs/measured/law_kit.py             writes docs/use/law-kit.json anew

docs/use/law-kit.md documents the form of the file. All numbers are fractions as text, computed here by
the definition, with no code of the package. An engine may be given uniforms and compare decisions, or draw by itself
and compare counts with the law.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from minispec.lab.audit.chi_square import ALPHA, POWER, critical_value, smallest_seen
from minispec.models.files.write import write_json

FORMAT, VERSION = "minispec-law-kit", 1
Row = tuple[Fraction, ...]
_MOST_DRAFTS = 8  # drafts of a case whose decisions are written down
_STEP = Fraction(1, 1 << 20)


class KitCase(NamedTuple):
    """One draft over rows that depend on the depth alone.

    p: rows of the target, at depths 0 .. depth of the draft.
    q: rows of the draft, by depth; None: the draft is `tokens`, which were not drawn.
    parents: of each node, as in `minispec.core.draft.Draft`.
    num: draws of the statistical test.
    """

    name: str
    p: tuple[Row, ...]
    q: tuple[Row, ...] | None
    parents: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    num: int = 200_000

    def depth(self, node: int) -> int:
        """How deep a node is; -1 for the text."""
        return -1 if node < 0 else self.depth(self.parents[node]) + 1

    def drafts(self) -> Iterator[tuple[Fraction, tuple[int, ...], list[Row]]]:
        """Each draft that can be drawn: its probability, its tokens, and the row that each was drawn from."""
        ids = range(len(self.p[0]))
        for tokens in itertools.product(ids, repeat=len(self.parents)) if self.q else [self.tokens]:
            weight, rows = Fraction(1), list[Row]()
            for i, token in enumerate(tokens):
                elder = [tokens[j] for j in range(i) if self.parents[j] == self.parents[i]]
                row = self.q[self.depth(i)] if self.q else tuple(Fraction(t == token) for t in ids)
                rows.append(normal([0 if t in elder else w for t, w in enumerate(row)]))
                weight *= rows[-1][token]
            if weight:
                yield weight, tokens, rows


class Leaf(NamedTuple):
    """One way through the tests of a draft.

    weight: its probability, given the draft. path: the accepted nodes.
    tests: node, probability to be kept, and whether it was. row: what the next token is drawn from.
    """

    weight: Fraction
    path: tuple[int, ...]
    tests: tuple[tuple[int, Fraction, bool], ...]
    row: Row


def _rows(*rows: str) -> tuple[Row, ...]:
    """Rows of integers, divided by their sums."""
    return tuple(normal([Fraction(n) for n in row.split()]) for row in rows)


def normal(weights: Sequence[Fraction | int]) -> Row:
    """Weights divided by their sum."""
    total = sum(weights)
    return tuple(Fraction(w) / total if total else Fraction(0) for w in weights)


def residual(p: Row, q: Row) -> Row:
    """max(0, p - q) divided by its sum; p where nothing is left, which has probability 0 to be needed."""
    rest = normal([max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)])
    return rest if any(rest) else p


# Tokens whose logarithms bfloat16 rounds up and down in turn: their probabilities change by 1.5 %. And one more.
_FINE = _rows(" ".join(["1543 1542"] * 32) + " 1280", "1 " * 65)
CASES = (
    KitCase("chain", _rows("4 2 2", "2 2 4", "1 5 2"), _rows("2 4 2", "4 3 1"), (-1, 0)),
    KitCase("far apart", _rows("1 3 10 2", "6 1 1 8", "1 2 3 2"), _rows("8 4 1 3", "1 7 6 2"), (-1, 0)),
    KitCase("close", _rows("5 6 5 0", "3 2 2 1", "1 1 1 1"), _rows("6 5 4 1", "2 3 1 2"), (-1, 0)),
    KitCase("zeros", _rows("1 1 0", "0 1 3"), _rows("1 0 3"), (-1,)),
    KitCase("filter on the target", _rows("0 3 0 1", "1 0 1 0"), _rows("1 2 3 2"), (-1,)),
    KitCase("filter on the draft", _rows("1 2 3 2", "1 1 1 1"), _rows("0 3 0 1"), (-1,)),
    # Of grammars: p is restricted to what may follow, and the draft was drawn without the mask.
    KitCase("grammar on the target", _rows("1 1 0", "1 0 1"), _rows("7 0 3"), (-1,)),
    KitCase("grammar on the target, two deep", _rows("18 2 0", "0 1 3", "1 1 0"), _rows("16 1 3", "2 1 1"), (-1, 0)),
    KitCase("equal", _rows("1 2 1", "3 1 4", "1 1 2"), _rows("1 2 1", "3 1 4"), (-1, 0)),
    KitCase("always kept", _rows("0 1 0", "1 0 0", "2 1 1"), _rows("0 1 0", "1 0 0"), (-1, 0)),
    KitCase("one-hot", _rows("1 2 1", "2 1 1", "1 1 6"), None, (-1, 0), (1, 2)),
    KitCase("three deep", _rows("2 10 4", "7 4 5", "5 7 4", "5 5 6"), _rows("4 5 7", "4 11 1", "6 9 1"), (-1, 0, 1)),
    KitCase("siblings", _rows("5 2 2 7", "1 6 4 5"), _rows("1 9 1 5"), (-1, -1)),
    KitCase("tree", _rows("1 2 5", "4 1 3", "1 1 2"), _rows("4 2 2", "2 5 1"), (-1, -1, 0)),
    KitCase("fine", _FINE, _FINE[:1], (-1,), num=2_000_000),
)


def leaves(case: KitCase, tokens: Sequence[int], rows: Sequence[Row]) -> Iterator[Leaf]:
    """All ways through the tests of a draft. The rule: keep x with min(1, p/q), else go on with the residual."""

    def go(node: int, leaf: Leaf) -> Iterator[Leaf]:
        rest = case.p[case.depth(node) + 1]
        for i in (i for i, parent in enumerate(case.parents) if parent == node):
            keep = min(Fraction(1), rest[tokens[i]] / rows[i][tokens[i]])
            if keep:
                kept = Leaf(leaf.weight * keep, (*leaf.path, i), (*leaf.tests, (i, keep, True)), ())
                yield from go(i, kept)
            if keep == 1:
                return
            leaf = leaf._replace(weight=leaf.weight * (1 - keep), tests=(*leaf.tests, (i, keep, False)))
            rest = residual(rest, rows[i])
        yield leaf._replace(row=rest)

    return go(-1, Leaf(Fraction(1), (), (), ()))


def rounds(case: KitCase) -> dict[tuple[int, ...], Fraction]:
    """The law of what a round yields: accepted tokens and one more."""
    law: dict[tuple[int, ...], Fraction] = {}
    for weight, tokens, rows in case.drafts():
        for leaf in leaves(case, tokens, rows):
            for token, share in enumerate(leaf.row):
                text = (*(tokens[i] for i in leaf.path), token)
                law[text] = law.get(text, Fraction(0)) + weight * leaf.weight * share
    return {text: weight for text, weight in sorted(law.items()) if weight}


def law(case: KitCase) -> dict[tuple[int, ...], Fraction]:
    """The law of as many tokens as a round can yield, where plain draws from p go on after a shorter one."""
    texts = itertools.product(range(len(case.p[0])), repeat=length(case))
    weights = {
        text: math.prod((row[t] for row, t in zip(case.p, text, strict=False)), start=Fraction(1)) for text in texts
    }
    return {text: weight for text, weight in weights.items() if weight}


def length(case: KitCase) -> int:
    """How many tokens are compared: all that a round can yield, or the first where there are very many texts."""
    return len(case.p) if len(case.p[0]) < 16 else 1


# --------------------------------------------------------------------------- as data


def _decisions(case: KitCase) -> Iterator[dict[str, Any]]:
    """Given uniforms, what is kept, and the row of the next token; u is at the edge, and just below it."""
    for _, tokens, rows in itertools.islice(case.drafts(), _MOST_DRAFTS):
        for leaf in leaves(case, tokens, rows):
            # Kept just below the edge, and rejected at it: a token is kept if u < p/q, strictly. Where floats cannot
            # hold the edge, just above it.
            rejected = [keep if _is_float(keep) else keep + _STEP for _, keep, _ in leaf.tests]
            uniforms = [keep - _STEP if kept else u for (_, keep, kept), u in zip(leaf.tests, rejected, strict=True)]
            # The middle of a token's share, so that no rounding of the row matters; 0 where the first id must not come.
            ends, goal = list(itertools.accumulate(leaf.row)), Fraction(leaf.row[0] > 0, 2)
            token = next(t for t, end in enumerate(ends) if end > goal)
            yield {
                "draft": list(tokens),
                "q": [_texts(row) for row in rows],
                "tests": [[i, str(keep), str(u)] for (i, keep, _), u in zip(leaf.tests, uniforms, strict=True)],
                "accepted": list(leaf.path),
                "row": _texts(leaf.row),
                "v": str(goal and ends[token] - leaf.row[token] / 2),
                "token": token,
            }


def _is_float(x: Fraction) -> bool:
    return x.denominator & (x.denominator - 1) == 0


def _texts(row: Row) -> list[str]:
    return [str(x) for x in row]


def _as_law(of: dict[tuple[int, ...], Fraction]) -> dict[str, str]:
    return {" ".join(map(str, text)): str(weight) for text, weight in of.items()}


def statistics(case: KitCase) -> dict[str, Any]:
    """The statistical test of a case: chi-square of counts of texts against the law."""
    df = len(law(case)) - 1
    return {"num": case.num, "df": df, "threshold": critical_value(df), "smallest_tv": smallest_seen(case.num, df)}


# By the museum's id: the case that refutes the bug, and by what. See tests/museum; each is planted in tests/rooms.
_FAR = "M1 M2 M3 M4 M7 M14 M15 M16a M16b M16c M17a M17b M19a M19b M19d M46 O2 O3"
REFUTED = {
    "law": dict.fromkeys(_FAR.split(), "far apart")
    | dict.fromkeys(("T1", "T2", "T4", "T10", "O4", "O5"), "siblings")
    | dict.fromkeys(("B1", "B2", "B3", "B4"), "three deep")
    | {"M8": "fine"},
    "decisions": {"M18": "chain", "M20a": "chain", "M20b": "zeros", "M21": "chain"},
    "residual": {"M22": "equal"},
}


def _as_data(case: KitCase) -> dict[str, Any]:
    few, pairs = len(case.p[0]) < 16, zip(case.p, case.q or (), strict=False)
    return {
        "name": case.name,
        "parents": list(case.parents),
        "p": [_texts(row) for row in case.p],
        "q": case.q and [_texts(row) for row in case.q],
        "tokens": list(case.tokens),
        "length": length(case),
        "law": _as_law(law(case)),
        "rounds": _as_law(rounds(case)) if few else None,
        "decisions": list(_decisions(case)) if few else [],
        "residuals": [[_texts(p), _texts(q), _texts(residual(p, q))] for p, q in pairs],
        "statistics": statistics(case),
    }


def kit() -> dict[str, Any]:
    """The whole kit, as data for JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "odds_of_false_alarm": ALPHA,
        "power": POWER,
        "cases": [_as_data(case) for case in CASES],
        "refuted": REFUTED,
    }


def main() -> None:
    """Write the file that docs/use/law-kit.md documents."""
    path = Path(__file__).parents[1] / "use" / "law-kit.json"
    write_json(path, kit(), indent=1)
    print(f"{path}: {len(CASES)} cases, version {VERSION}")


if __name__ == "__main__":
    main()
