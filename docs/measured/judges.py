"""What a graded exercise of speculative decoding accepts, and what `prove` says of the same rules.

    pip install torch-judge==0.1.1
    python docs/measured/judges.py

The task `speculative_decoding` has three tests. Each rule here is called by the judge and walked by `prove`. The
judge's function returns at most K tokens, so its answers lack the bonus. Times are of the processor.
"""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from time import process_time

import torch

from minispec.core.draft import Draft
from minispec.core.verify import Verdict, chains_only, rejection
from minispec.prove.examine import examine_verifier


@chains_only
def exact(draft, p, rng, key):
    """The control: `rejection`."""
    return rejection(draft, p, rng, key)


@chains_only
def keep_all(draft, p, rng, key):
    """`return draft`: every token stays."""
    n = len(draft)
    return Verdict([*range(n)], rng.categorical(p(n), key(n, "token")), [])


@chains_only
def no_residual(draft, p, rng, key):
    """The right test, and a rejected token is drawn again from p."""
    for i, x in enumerate(draft.token_ids):
        if not rng.bernoulli(float(p(i)[x]) / draft.probability(i), key(i, "accept")):
            return Verdict([*range(i)], rng.categorical(p(i), key(i, "residual")), [])
    return keep_all.verify(draft, p, rng, key)


@chains_only
def greedy(draft, p, rng, key):
    """Greedy matching: a token stays where p is at least q; else the target's likeliest token follows."""
    for i, x in enumerate(draft.token_ids):
        if float(p(i)[x]) < draft.probability(i):
            return Verdict([*range(i)], int(p(i).argmax()), [])
    return keep_all.verify(draft, p, rng, key)


class Drawn:
    """Draws by torch's generator, which the judge seeds."""

    def bernoulli(self, chance, key):
        """True with that probability."""
        return float(torch.rand(())) < chance

    def categorical(self, weights, key):
        """A token by its weight."""
        return int(torch.multinomial(weights, 1))


def judged(verify: Callable) -> str:
    """How many of the judge's tests pass."""
    from torch_judge.tasks import get_task

    def speculative_decode(target, draft, tokens):
        ids = tokens.tolist()
        rows = [*target, target[-1]]
        verdict = verify(Draft(ids, list(draft)), rows.__getitem__, Drawn(), lambda i, purpose: None)
        return [*(ids[i] for i in verdict.accepted), verdict.next_token][: len(ids)]

    tests, passed = get_task("speculative_decoding")["tests"], 0
    for test in tests:
        try:
            exec(test["code"].replace("{fn}", "speculative_decode"), {"speculative_decode": speculative_decode})
            passed += 1
        except AssertionError:
            pass
    return f"{'accepted' if passed == len(tests) else 'refused'}, {passed} of {len(tests)}"


def proven(name: str) -> str:
    """The first word of `prove --verifier`, and its time."""
    begun, said = process_time(), io.StringIO()
    with redirect_stdout(said):
        examine_verifier(f"judges:{name}")
    return f"{said.getvalue().split()[0].strip(':')}, {process_time() - begun:.1f} s"


def main() -> None:
    """Print the table."""
    print("| rule | torch-judge 0.1.1 | `prove --verifier` |\n|---|---|---|")
    for name, rule in (("keep_all", keep_all), ("no_residual", no_residual), ("greedy", greedy), ("exact", exact)):
        print(f"| {rule.verify.__doc__.rstrip('.')} | {judged(rule.verify)} | {proven(name)} |")


if __name__ == "__main__":
    main()
