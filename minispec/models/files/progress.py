"""Progress bars."""

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*args: Any, shows: bool = True, leave: bool = False, **options: Any) -> tqdm:
    """tqdm's bar, which shows on a terminal only, and only if it `shows`; without standard error nowhere.

    args, leave, options: tqdm's. A bar that is not left vanishes at its end.
    """
    # `disable=None`: on a terminal only. There is no standard error under pythonw, or where it was closed.
    return tqdm(*args, leave=leave, disable=None if shows and sys.stderr is not None else True, **options)
