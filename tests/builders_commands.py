"""Runs of `relax-trio` as real processes, with a tiny checkpoint and a one-turn agent."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

AGENT = Path(__file__).parent / "agents" / "chatting.py"


def write_rows(path: Path, count: int) -> Path:
    rows = [
        {"input": [{"role": "user", "content": f"What is {i} + {i}?"}], "metadata": {"row": i}} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(name: str, checkpoint: Path, data: Path, out: Path, *more: str, tag: str = "no-tag") -> list[str]:
    """Words of a small run: two Groups of two Sessions a step."""
    agent = shlex.join([sys.executable, "-I", "-S", str(AGENT), tag])
    return [
        *(sys.executable, "-m", "relax_trio", name),
        *("--hf-checkpoint", str(checkpoint), "--prompt-data", str(data), "--output-dir", str(out)),
        *("--agent-command", agent, "--agent-term-grace", "0.3"),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--rollout-max-response-len", "8", "--rollout-max-context-len", "128", "--embedded-threads", "1"),
        *more,
    ]


@contextmanager
def running(words: list[str], *, temp: Path, log: Path):
    """A command in the background with a temporary directory of its own; killed if it is still there at the end."""
    temp.mkdir(exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, "TMPDIR": str(temp)}
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def wait_until(predicate, *, within_s: float, log: Path | None = None) -> None:
    """Wait for what other processes do; fails with the log's end."""
    end = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s; the log ends:\n{log.read_text()[-3000:] if log else ''}")
        time.sleep(0.05)


def run(words: list[str], *, within_s: float = 120, **kwargs) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(words, capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL, **kwargs)
