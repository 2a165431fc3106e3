"""Starts and ends many real agents and checks that nothing of them is left.

    python tools/check_processes.py --dropped 200 --ended 1000

Three checks, each with agents started afresh and with agents forked from a warm parent:

* Sessions whose agents and grandchildren ignore SIGTERM, some of them in sessions of their own, are dropped at once:
  how long until no process is left of one, at a grace of 5 s.
* The engine of as many such agents is killed by SIGKILL: how long until no agent is left.
* Sessions are started and end by themselves, leaving a daemon behind: descriptors, zombies and directories gained.

Prints a line for each and exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from relax_trio.agent.base import AgentSpec
from relax_trio.agent.launcher import ProcessAgentLauncher
from relax_trio.config.tree import AgentConfig
from relax_trio.data.task import TaskInput
from relax_trio.ids import group_id, new_credential, place_id
from relax_trio.sync.process import STOP_S, Warden
from relax_trio.sync.services import Services
from relax_trio.warden.tree import children_of

GRACE_S = 5.0
DROP_P99_S = 7.0
ENGINE_KILLED_S = 10.0
AT_ONCE = 16
BASE_URL = "http://127.0.0.1:1/agentic_api"

STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():                            # a child in the agent's group
    signal.pause()
if not os.fork():                            # one in a session of its own
    os.setsid()
    signal.pause()
if not os.fork():                            # a daemon: its parent is gone, and so is its environment
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sleep", [sys.argv[1], "1000"], {})
signal.pause()
"""
"""Four processes that only SIGKILL ends, each with the tag in its command line, once the daemon's parent is gone."""
N_STUBBORN = 4

BRIEF = """
import os, time
if not os.fork():
    os.setsid()
    time.sleep(1000)
"""


def spec(index: int) -> AgentSpec:
    task = TaskInput(row=index, source=f"rows:{index}", prompt="", messages=(), metadata={})
    group = group_id(index)
    return AgentSpec(
        place=place_id(group, 0),
        group=group,
        credential=new_credential(),
        base_url=BASE_URL,
        mode="train",
        task=task,
    )


@asynccontextmanager
async def launching(
    home: Path, script: str, tag: str, *, warm: bool
) -> AsyncIterator[tuple[Warden, ProcessAgentLauncher]]:
    """A launcher of agents that run `script`, with directories below `home`."""
    (home / "agent.py").write_text(script)
    (home / "temp").mkdir(exist_ok=True)
    config = AgentConfig(
        agent_command=f"{sys.executable} agent.py {tag}",
        agent_cwd=home,
        agent_term_grace=GRACE_S,
        agent_preload=("json",) if warm else (),
        keep_session_dirs="never",
    )
    async with Services.open() as services:
        warden = Warden()
        await services.start(warden.run, name="warden", stop_s=STOP_S)
        launcher = ProcessAgentLauncher(warden, config, home / "run", home / "temp")
        await services.start(partial(launcher.keep_warm, BASE_URL), name="warm parent")
        yield warden, launcher


def tagged(tag: str) -> int:
    """How many processes live whose command line holds `tag`."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                count += tag.encode() in Path(f"/proc/{entry}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return count


async def until(predicate: Callable[[], bool], within_s: float) -> float:
    """Wait until `predicate()`; returns the seconds it took."""
    started_s = time.monotonic()
    with trio.fail_after(within_s):
        while not predicate():  # noqa: ASYNC110 - other processes tell nobody of their progress
            await trio.sleep(0.02)
    return time.monotonic() - started_s


# --- dropped at once -------------------------------------------------------------------------------------------


async def check_drop(home: Path, n_sessions: int, *, warm: bool) -> tuple[str, bool]:
    """Drop Sessions with stubborn agents; each tells how long it took to end its tree."""
    tag = f"rt-drop-{uuid.uuid4().hex}"
    ends: list[float] = []
    n_before = 0
    async with launching(home, STUBBORN, tag, warm=warm) as (_, launcher):
        n_before = tagged(tag)  # of the warm parent
        dropped_s = math.nan

        async def session(index: int) -> None:
            try:
                async with launcher.open(spec(index)):
                    await trio.sleep_forever()
            finally:
                ends.append(time.monotonic() - dropped_s)

        async with trio.open_nursery() as nursery:
            for index in range(n_sessions):
                nursery.start_soon(session, index)
            # A keeper that a warm parent forked has the tag in its command line as well.
            n_processes = n_sessions * (N_STUBBORN + warm)
            await until(lambda: tagged(tag) - n_before == n_processes, 120)
            dropped_s = time.monotonic()
            nursery.cancel_scope.cancel()
        n_survivors = tagged(tag) - n_before
    p99 = sorted(ends)[math.ceil(0.99 * len(ends)) - 1]
    text = (
        f"{n_sessions} Sessions of {N_STUBBORN} stubborn processes dropped: gone after {min(ends):.2f} to "
        f"{max(ends):.2f} s, p99 {p99:.2f} s; {n_survivors} survivors"
    )
    return text, p99 <= DROP_P99_S and n_survivors == 0


# --- the engine is killed --------------------------------------------------------------------------------------


async def be_engine(home: Path, n_sessions: int, tag: str, *, warm: bool) -> None:
    """Run stubborn agents until killed."""

    async def session(launcher: ProcessAgentLauncher, index: int) -> None:
        async with launcher.open(spec(index)):
            await trio.sleep_forever()

    async with launching(home, STUBBORN, tag, warm=warm) as (_, launcher), trio.open_nursery() as nursery:
        for index in range(n_sessions):
            nursery.start_soon(session, launcher, index)


async def check_kill(home: Path, n_sessions: int, *, warm: bool) -> tuple[str, bool]:
    """Kill an engine with stubborn agents; nothing else ends them."""
    tag = f"rt-kill-{uuid.uuid4().hex}"
    words = [sys.executable, __file__, "--be-engine", str(home), tag, str(n_sessions), *(["--warm"] if warm else [])]
    engine = subprocess.Popen(words)  # noqa: ASYNC220 - it is killed below
    try:
        # With the engine itself, and the warm parent and its keepers.
        await until(lambda: tagged(tag) == 1 + warm + n_sessions * (N_STUBBORN + warm), 120)
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait()
    seconds = await until(lambda: tagged(tag) == 0, 60)
    text = f"engine of {n_sessions} such Sessions killed by SIGKILL: no agent left after {seconds:.2f} s"
    return text, seconds <= ENGINE_KILLED_S


# --- started and ended -----------------------------------------------------------------------------------------


async def check_ended(home: Path, n_sessions: int, *, warm: bool) -> tuple[str, bool]:
    """Start Sessions, a few at once, that end by themselves; count what that costs for good."""
    tag = f"rt-end-{uuid.uuid4().hex}"
    async with launching(home, BRIEF, tag, warm=warm) as (warden, launcher):

        async def sessions(indexes: Iterable[int]) -> None:
            for index in indexes:
                async with launcher.open(spec(index)) as agent:
                    await agent.wait()

        def held() -> dict[str, int]:
            parents = [pid for pid in children_of(warden.pid) if warm]
            owners = [os.getpid(), warden.pid, *parents]
            return {
                "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in owners),
                "zombies and other children": sum(len(children_of(pid)) for pid in owners),
                "directories": len(os.listdir(home / "temp")),
            }

        await sessions(range(1))
        await until(lambda: len(children_of(warden.pid)) == warm, 10)
        before = held()
        started_s = time.monotonic()
        shared = iter(range(n_sessions))
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(sessions, shared)
        seconds = time.monotonic() - started_s
        await until(lambda: len(children_of(warden.pid)) == warm, 10)
        gained = {what: count - before[what] for what, count in held().items()}
    gained["processes"] = tagged(tag)
    text = f"{n_sessions} Sessions started and ended in {seconds:.1f} s: gained " + ", ".join(
        f"{count} {what}" for what, count in gained.items()
    )
    return text, not any(gained.values())


async def check_all(home: Path, n_dropped: int, n_ended: int) -> bool:
    met = True
    for check, n_sessions in ((check_drop, n_dropped), (check_kill, n_dropped), (check_ended, n_ended)):
        for warm in (False, True):
            text, is_met = await check(home, n_sessions, warm=warm)
            met &= is_met
            print(f"{'forked' if warm else 'afresh'}: {text}: {'met' if is_met else 'MISSED'}", flush=True)
    return met


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dropped", type=int, default=200, metavar="SESSIONS")
    parser.add_argument("--ended", type=int, default=1000, metavar="SESSIONS")
    parser.add_argument("--be-engine", nargs=3, metavar=("HOME", "TAG", "SESSIONS"), help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(None if words is None else list(words))
    if options.be_engine is not None:
        home, tag, n_sessions = options.be_engine
        trio.run(partial(be_engine, Path(home), int(n_sessions), tag, warm=options.warm))
        return 0
    with tempfile.TemporaryDirectory(prefix="relax-trio-check-") as home:
        return 0 if trio.run(check_all, Path(home), options.dropped, options.ended) else 1


if __name__ == "__main__":
    sys.exit(main())
