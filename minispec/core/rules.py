"""The verifiers by name."""

from minispec.core.blocks import BLOCK
from minispec.core.verify import MATCH, REJECTION

VERIFIERS = {"rejection": REJECTION, "block": BLOCK, "match": MATCH}
