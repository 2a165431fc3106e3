"""The benchmark of the client of SGLang servers on a small scale: every attempt of every round comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_engine.py"


def test_every_round_is_answered_and_told():
    words = ["--attempts", "20", "--prefix", "50", "--new", "7", "--rounds", "3"]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr == ""
    assert done.stdout.startswith("20 attempts at once, 50 tokens each and 7 new")
    median = float(done.stdout.rpartition("client CPU of an attempt: ")[2].split()[0])
    assert median > 0
    assert done.returncode == (0 if median <= 2.0 else 1)
