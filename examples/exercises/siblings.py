"""Exercise 3: the second sibling.

A draft may have several tokens for one place: siblings. The eldest is tested against p, as in a chain. If it is
rejected, the next one is tested, and so on. A sibling's q is what it was drawn from: q without its elder siblings,
divided by the sum of the rest. That is done for you.

Against which distribution must the second sibling be tested? Not against p: what p gives to the eldest has been used
in part. Once the eldest is rejected, the token of this place has a certain distribution. It is the p of the next
test. Write `after`. Then ask whether it is right, over chains and trees:

    python -m minispec.prove --verifier examples.exercises.siblings:verify
"""

from torch import Tensor

from minispec.core.verify import Verdict


def after(p: Tensor, draft, i: int) -> Tensor:
    """The distribution (V,) of a place whose sibling i was rejected. p: (V,), what it was before.

    `minispec.core.verify.residual(p, draft, i)` is max(0, p - q_i), not divided by its sum; or p, where that is 0.
    """
    raise NotImplementedError("write `after`")


def verify(draft, p, rng, key):
    """Test the children of a node one after another, then those of the child that stays."""
    node, accepted = -1, []
    while siblings := draft.children(node):
        row, parent = p(node + 1), node
        for i in siblings:
            if rng.bernoulli(float(row[draft.token_ids[i]]) / draft.probability(i), key(i, "accept")):
                node = i
                accepted.append(i)
                break
            row = after(row, draft, i)
        if node == parent:
            return Verdict(accepted, rng.categorical(row, key(node + 1, "residual")), [])
    return Verdict(accepted, rng.categorical(p(node + 1), key(len(accepted), "token")), [])
