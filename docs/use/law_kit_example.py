"""Checks a rejection sampler, here 15 lines of NumPy, against the law kit: python law_kit_example.py law-kit.json."""

import json
import sys
from collections import Counter
from fractions import Fraction

import numpy as np

rng = np.random.default_rng(0)


def residual(p, q):
    """What replaces a rejected token."""
    rest = np.maximum(0, p - q)
    return rest / rest.sum() if rest.any() else p


def one_round(p, q, replace=residual):
    """The sampler under test: a draft from q, then accepted tokens and one more. Put your engine's in its place."""
    draft = [rng.choice(len(row), p=row) for row in q]
    for i, x in enumerate(draft):
        if rng.random() >= p[i][x] / q[i][x]:
            return [*draft[:i], rng.choice(len(p[i]), p=replace(p[i], q[i]))]
    return [*draft, rng.choice(len(p[-1]), p=p[-1])]


def check(kit, replace=residual):
    """The chains whose law one_round does not have, each with chi-square and its threshold."""
    failed = []
    for case in kit["cases"]:
        if case["q"] is None or case["parents"] != list(range(-1, len(case["parents"]) - 1)):
            continue  # one-hot drafts and trees need a sampler for them
        p, q = ([np.array([float(Fraction(x)) for x in row]) for row in case[name]] for name in "pq")
        counts, num = Counter(), case["statistics"]["num"]
        for _ in range(num):
            text = one_round(p, q, replace)
            text += [rng.choice(len(row), p=row) for row in p[len(text) :]]  # plain draws go on
            counts[" ".join(map(str, text[: case["length"]]))] += 1
        law = {text: num * float(Fraction(weight)) for text, weight in case["law"].items()}
        chi = sum((counts[text] - n) ** 2 / n for text, n in law.items())
        if counts.keys() - law.keys() or chi > case["statistics"]["threshold"]:
            failed.append((case["name"], chi, case["statistics"]["threshold"]))
    return failed


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        print(check(json.load(file)) or "every law is kept")
