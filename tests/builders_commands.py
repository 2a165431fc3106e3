"""Runs of `relax-trio` as real processes, with a tiny checkpoint and a one-turn agent."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Container
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
def running(words: list[str], *, temp: Path, log: Path, env: dict[str, str] | None = None):
    """A command in the background with a temporary directory of its own; killed if it is still there at the end."""
    temp.mkdir(exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(env or {}), "TMPDIR": str(temp)},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


class Told:
    """What the agents of a run say before each model call: the numbers of their rows, through a FIFO."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR)  # so that no agent waits for a reader, and none ends what is read
        self._rest = b""

    def wait_for(
        self,
        count: int,
        process: subprocess.Popen[bytes],
        log: Path,
        *,
        rows: Container[int] | None = None,
        within_s: float = 300,
    ) -> None:
        """Wait until `count` more calls are about to be made, of these rows; fails with the log's end."""
        end = time.monotonic() + within_s
        while count > 0:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                count -= rows is None or int(line) in rows
            elif select.select([self._fd], [], [], 1.0)[0]:
                self._rest += os.read(self._fd, 4096)
            elif process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"not told of {count} calls; the log ends:\n{log.read_text()[-3000:]}")

    def close(self) -> None:
        os.close(self._fd)


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
