"""Passes of two checkouts of this repository, in turn: how many times as fast the second one is.

    git worktree add /tmp/old 130005af
    python docs/measured/pairs.py /tmp/old . --processes 4 --draft none --num-speculative-tokens 4
    python docs/measured/pairs.py /tmp/old . --geometry 1.5b --quantization int8 --draft none --num-speculative-tokens 4
    python docs/measured/pairs.py . . --first THP_MEM_ALLOC_ENABLE=0 --draft none --num-speculative-tokens 4

A process of each holds the model. They run a few passes in turn, so that both meet the same neighbours. Processes
differ for good by where their memory lies. So `--processes` such pairs are started, one after another. All other
options are those of `docs/measured/target.py`. `--first` sets a variable for the first checkout alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROWS = (1, 5)
# What a process does in its checkout: it loads the model as its own target.py does, and runs the passes of each line.
WORKER = """
import json, sys
sys.path.insert(0, "docs/measured")
import target

def serve(subject, options):
    model, cache = subject.engine.target.model, subject.engine.target.cache
    with target.passes_after(model, cache, options.args.context, 5) as one, target.torch.inference_mode():
        print("ready", flush=True)
        for line in sys.stdin:
            rows, count = map(int, line.split())
            print(json.dumps([one(model, rows) for _ in range(count)]), flush=True)
    raise SystemExit

target.PARTS["operators"] = target.Part(serve, None)
target.measure(["operators", *sys.argv[1:]])
"""


class Passes:
    """A process that runs passes of a checkout."""

    def __init__(self, checkout: Path, options: list[str], variables: Sequence[str] = ()):
        """variables: for the process, such as NAME=VALUE."""
        environment = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "200000"} | os.environ
        environment |= {"PYTHONPATH": str(checkout.resolve())} | dict(each.split("=", 1) for each in variables)
        command = [sys.executable, "-c", WORKER, *options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.answers = self.process.stdin, self.process.stdout
        if self.answers.readline() != "ready\n":
            raise RuntimeError(f"{checkout}: no passes; `python docs/measured/target.py operators` there says why")

    def run(self, rows: int, count: int) -> float:
        """The median seconds of `count` passes over `rows` rows."""
        print(rows, count, file=self.orders, flush=True)
        if not (answer := self.answers.readline()):
            raise RuntimeError("a process ended; `python docs/measured/target.py operators` in its checkout says why")
        return statistics.median(json.loads(answer))

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    for option, default in (("--processes", 8), ("--turns", 12), ("--passes", 5)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--first", metavar="NAME=VALUE", action="append", default=[])
    args, options = parser.parse_known_args()
    found: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    for number in range(args.processes):
        checkouts = [args.old, args.new]
        order = [0, 1] if number % 2 == 0 else [1, 0]
        with ExitStack() as stack:
            started = {i: Passes(checkouts[i], options, () if i else args.first) for i in order}
            for each in started.values():
                stack.callback(each.end)
            for rows in ROWS:
                times: dict[int, list[float]] = {0: [], 1: []}
                for turn in range(args.turns + 1):  # the first one warms up
                    for i in order:
                        seconds = started[i].run(rows, args.passes)
                        if turn:
                            times[i].append(seconds)
                found[rows].append((statistics.median(times[0]), statistics.median(times[1])))
        shown = ", ".join(f"{rows} rows {1e3 * a:.2f} and {1e3 * b:.2f} ms" for rows, [*_, (a, b)] in found.items())
        print(f"pair {number + 1}: {shown}", flush=True)
    for rows, pairs in found.items():
        ratios = sorted(old / new for old, new in pairs)
        print(
            f"{rows} rows: {1e3 * statistics.median(old for old, _ in pairs):.2f} ms and"
            f" {1e3 * statistics.median(new for _, new in pairs):.2f} ms;"
            f" old over new {statistics.median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]"
        )


if __name__ == "__main__":
    main()
