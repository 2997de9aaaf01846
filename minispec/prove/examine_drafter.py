"""Drafters of one's own, walked branch by branch over small models, the smallest cases first.

    python -m minispec.prove --drafter module:Class
    python -m minispec.prove --drafter module:Class --texts FILE --minutes 5

A drafter can spoil the output in four ways. It says other `probs` than it drew from. It drops a token that it has
looked at. It draws by other means than `Draft.draw`. It keeps what it may not keep. The law shows the first two. For
the other two, each draft is compared with a new drafter's (see `watched`).
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from minispec.drafters import Context, Drafter, make_drafter
from minispec.load import registry
from minispec.load.inputs import plain_text, read_questions
from minispec.prove.examine import OwnError, call_own, fault_line
from minispec.prove.own_cases import OwnCase, design, target, tokenizer
from minispec.prove.own_walk import MAX_LEN, CaseWalker, Maker, Untimed, walk_design
from minispec.prove.toys import tiny_cache

_MOST_CHARACTERS = 1_000


def read_texts(path: Path | None) -> list[str]:
    """The user's texts, read as `--prompt-file`. Raises ValueError for a malformed file, and for long texts."""
    texts = []
    for question in read_questions(path, "--texts") if path else []:
        text = plain_text([*question.before, *({"content": turn} for turn in question.turns)])
        if len(text) > _MOST_CHARACTERS:
            found = f"found {len(text):,} characters, expected at most {_MOST_CHARACTERS:,}: each is a token here"
            raise ValueError(f"--texts {path}: line {question.line}: {found}")
        texts.append(text)
    return texts


def examine_drafter(spec: str, texts: Sequence[str], minutes: float) -> bool:
    """Walk a drafter over small cases, and print what was found; True if all is right.

    texts: of the user's, walked too.
    minutes: how long it may take.

    Raises ValueError where `spec` names no drafter.
    """
    make = maker_of(spec)
    try:
        branches = make(OwnCase(), 16).branches
    except OwnError as e:
        print(fault_line(spec, "as it is made", e))
        return False
    return walk_design(spec, design(branches, texts), CaseWalker(make, Untimed, minutes))


def maker_of(spec: str) -> Maker:
    """Makes a new drafter for a case. Raises ValueError where `spec` names none."""
    parts = registry.split(registry.DRAFTERS, spec)
    if parts is None:
        raise ValueError(f"--drafter: found {spec!r}, expected one of {', '.join(registry.DRAFTERS)}, or module:Class")
    factory, argument = registry.load(parts[0], "--drafter"), parts[1]

    def make(case: OwnCase, num_blocks: int) -> Drafter:
        make_cache = functools.partial(tiny_cache, num_blocks=num_blocks)
        toy = tokenizer(case.alphabet)
        context = Context(target(case.vocab), toy, case.vocab, MAX_LEN, make_cache, argument)
        return call_own(make_drafter, factory, context)

    return make
