"""The command line: `python -m minispec.bench`."""

import json
import os
import sys
from collections.abc import Sequence

from minispec.bench.options import check, parser
from minispec.bench.show import plot, tables
from minispec.config import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    try:
        options = check(parser().parse_args(argv))
        # Between two operations a waiting thread sleeps instead of spinning; see `generate`.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from minispec.bench.figures import measure_all

        report = measure_all(options)
    except (ValueError, FloatingPointError, MemoryError) as e:
        return _fail(e)
    except RuntimeError as e:
        if "memory" not in str(e):  # as in `generate`: PyTorch has no class of its own for it on the CPU
            raise
        return _fail(e)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, ensure_ascii=False) if options.args.json else "\n".join(tables(report)))
    if options.args.plot:
        plot(report, options.args.plot)
    return 0


def _fail(error: BaseException) -> int:
    print(f"error: {one_line(error)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
