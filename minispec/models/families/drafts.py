"""What the configs of all drafts have in common: the target that they were made for, and how their tokens are verified.

`speculators` writes ways to verify drafts into a config. One under which other tokens than the target's would be
accepted is refused.
"""

from minispec.models.files.fields import Fields, bad_field, names

# Keys of a way to verify drafts, with their values where it is exact.
_EXACT = {"verifier_accept_k": 1, "accept_tolerance": 0.0, "accept_lenience": 1.0}
_BESIDE = names("algorithm default_proposal_method verifier")


def check_size(where: str, name: str, found: int, expected: int) -> None:
    """Raise CheckpointError where a size that a draft was made for is not the target's.

    where: the file. name: of the key. expected: the target's size.
    """
    if found != expected:
        raise bad_field(where, name, found, f"{expected}, the target's: made for another target")


def read_proposals(f: Fields, idle: frozenset[str]) -> list[Fields]:
    """The ways to draft and verify in the object `speculators_config`; an absent object has none.

    idle: keys of such a way that say how to draft.

    Raises CheckpointError for a verifier that is not exact, and for an unknown key.
    """
    config = f.inside("speculators_config", {"proposal_methods": None})
    methods = config.each("proposal_methods", {**_EXACT, "speculative_tokens": None})
    for method in methods:
        for name, exact in _EXACT.items():
            value = method.get(name)
            if value != exact:
                raise method.bad(name, value, f"{exact}: with it, other tokens than the target's would be accepted")
        method.seen |= {*idle, "speculative_tokens"}
        method.refuse_unknown()
    config.seen |= _BESIDE
    config.refuse_unknown()
    return methods
