"""The benchmark of the API on a small scale: that it measures what it says. Times themselves are nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_api.py"


@pytest.mark.slow
def test_both_kinds_of_request_are_offered_and_told():
    words = ["--json", "--sessions", "8", "--tokens", "2000", "--rate", "20", "--seconds", "1", "--rounds", "2"]
    done = subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)

    assert done.returncode == (0 if told["is_met"] else 1)
    for kind in ("floor", "api"):
        assert told[kind]["n"] + told[kind]["skipped"] == 40
        assert 0 < told[kind]["median_ms"] <= told[kind]["p99_ms"] <= told[kind]["max_ms"]
    assert told["added"]["median_ms"] == told["api"]["median_ms"] - told["floor"]["median_ms"]
    assert told["conditions"]["body_bytes"] > 2000
