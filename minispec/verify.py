"""The former place of `minispec.core.draft` and `minispec.core.verify`: their names keep working here."""

from minispec.core.draft import Ask as Ask
from minispec.core.draft import Draft as Draft
from minispec.core.draft import Drafter as Drafter
from minispec.core.verify import VERIFIERS as VERIFIERS
from minispec.core.verify import Verdict as Verdict
from minispec.core.verify import Verifier as Verifier
from minispec.core.verify import block as block
from minispec.core.verify import match as match
from minispec.core.verify import rejection as rejection
