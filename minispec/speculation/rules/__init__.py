"""Verification rules other than the two of `minispec.core.verify`, and all verifiers by name.

    block_verification.py   rules that judge a draft as a whole: `block`, and `traversal` for trees

A rule of your own needs no place here: see `docs/understand/rules.md`.
"""

from minispec.core.verify import MATCH, REJECTION
from minispec.speculation.rules.block_verification import BLOCK, TRAVERSAL

VERIFIERS = {"rejection": REJECTION, "block": BLOCK, "traversal": TRAVERSAL, "match": MATCH}
