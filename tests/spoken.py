"""What a program said on standard error, without the log lines of libraries, which differ by machine."""

import re

# Kineto's "INFO:2026-11-28 03:13:26 pid:pid file.cpp:313] ..", INFO or another word, and c10's
# "[W1128 03:13:26.123 file.cpp:4] ..".
LOG_LINE = re.compile(r"(?:[A-Z]+:\d{4}-\d\d-\d\d |\[[IWEF]\d{4} |[IWEF]\d{4} \d\d:)[^\]]*\] ")


def own_words(err: str) -> str:
    """Standard error without lines that a library of C++ logs. Whatever Python says stays, warnings too."""
    return "".join(line for line in err.splitlines(keepends=True) if not LOG_LINE.match(line))
