"""Builders of the tests with real processes: a running warden, marked processes, and looking for survivors."""

from __future__ import annotations

import os
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from relax_trio.sync.process import STOP_S, Warden
from relax_trio.sync.services import Services

GRACE_S = 0.2


@asynccontextmanager
async def running_warden():
    """A warden service for the length of the block, which fails rather than hangs."""
    with trio.fail_after(60):
        async with Services.open() as services:
            warden = Warden()
            await services.start(warden.run, name="warden", stop_s=STOP_S)
            yield warden


def shell(warden, script, tmp_path, *, grace_s=GRACE_S, env=None, cwd=None, log="run.log", name="test"):
    """A process block that runs `script` in bash."""
    return warden.process(
        argv=["/bin/bash", "-c", script],
        cwd=cwd or tmp_path,
        env={"PATH": os.environ["PATH"]} if env is None else env,
        log_path=tmp_path / log,
        name=name,
        term_grace_s=grace_s,
    )


def new_tag() -> str:
    """A text to put into command lines and to look for with `alive`."""
    return f"rt-tag-{uuid.uuid4().hex}"


def sleeper(tag: str) -> str:
    """Bash: become a process that only its command line identifies."""
    return f"exec -a {tag} sleep 1000"


def alive(tag: str) -> list[int]:
    """Pids of the living processes (zombies have no command line) whose command line holds `tag`."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if tag.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                    found.append(int(entry))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def is_alone(tag: str) -> bool:
    """Whether one `sleeper` lives and nobody else of its kin, such as those that made it."""
    pids = alive(tag)
    try:
        return len(pids) == 1 and Path(f"/proc/{pids[0]}/cmdline").read_bytes().startswith(tag.encode())
    except FileNotFoundError:
        return False


def status_of(pid: int) -> dict[str, str]:
    """`/proc/PID/status`; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


async def eventually(predicate, *, within_s=10.0):
    """Wait until `predicate()` is true: other processes tell nobody of their progress."""
    with trio.fail_after(within_s):
        while not predicate():  # noqa: ASYNC110 - nothing to wait on
            await trio.sleep(0.01)
