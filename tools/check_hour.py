"""Plays a virtual hour of partial rollout with 64 Sessions at work and measures what it takes in reality.

    python tools/check_hour.py --rounds 5

The schedule is that of tests/lifecycle/test_explorer_hour.py, which says what happens in it. Prints the medians and
exits with 1 if the hour took longer than two seconds of real time; where others are at work, only CPU time tells.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lifecycle"))

from test_explorer_hour import HOUR_S, hour

from relax_trio.testing import Bench, run_virtual

MOST_S = 2.0


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="each under another schedule")
    options = parser.parse_args(None if words is None else list(words))
    real_s, cpu_s = [], []
    for seed in range(options.rounds):
        bench, started_s, started_cpu_s = Bench(), time.perf_counter(), time.process_time()
        run_virtual(hour, bench, seed=seed)
        real_s.append(time.perf_counter() - started_s)
        cpu_s.append(time.process_time() - started_cpu_s)
    took_s = statistics.median(real_s)
    print(
        f"a virtual hour ({HOUR_S:g} s) of 64 Sessions at work, {len(bench.sessions.seen)} in all: {took_s:.2f} s of "
        f"real time, {statistics.median(cpu_s):.2f} s of CPU (medians of {options.rounds}): "
        f"{'met' if took_s <= MOST_S else 'MISSED'}"
    )
    return 0 if took_s <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
