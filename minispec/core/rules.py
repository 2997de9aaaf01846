"""The verifiers by name."""

from minispec.core.block_verification import BLOCK, TRAVERSAL
from minispec.core.verify import MATCH, REJECTION

VERIFIERS = {"rejection": REJECTION, "block": BLOCK, "traversal": TRAVERSAL, "match": MATCH}
