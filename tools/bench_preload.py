"""Measures what `--agent-preload` saves: CPU time of a Session's start, afresh and forked from a warm parent.

    python tools/bench_preload.py --sessions 40 --modules openai

The agent imports the modules and prints; that print is its first line. Both ways go through the warden as in a run. The
CPU time of a start is that of every process it takes, user and system: of the agent up to its first line, and, whatever
they do for it until it is gone, of the warm parent, the go-between, the keeper and the warden. The last line has the
ratio; exits with 1 where that is below `--at-least`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from relax_trio.sync.process import STOP_S, Child, Warden
from relax_trio.sync.services import Services

AGENT = """import resource{imports}
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime, flush=True)
import os
os._exit(0)  # what comes after the first line is not its start
"""


@dataclass(frozen=True)
class Cost:
    """CPU seconds per Session.

    Attributes:
      agent: median of the agents' own, from their fork to their first line.
      around: mean of all that other processes did for a Session, from its order to its end.
    """

    agent: float
    around: float

    @property
    def total(self) -> float:
        return self.agent + self.around


async def measure(home: Path, n_sessions: int, modules: list[str], *, warm: bool) -> Cost:
    """Start Sessions one after another; all processes but the agents are in the difference of two totals."""
    name = "forked" if warm else "fresh"
    before = cpu_of_children()
    idle = await run(home, 0, modules, warm=warm, name=f"{name}-idle")
    after_idle = cpu_of_children()
    agents = await run(home, n_sessions, modules, warm=warm, name=name)
    after = cpu_of_children()
    assert not idle, "nothing was started"
    # The first run's total holds all that is done once: the warden, and the warm parent's imports.
    everything = (after - after_idle) - (after_idle - before)
    return Cost(agent=statistics.median(agents), around=max(0.0, everything - sum(agents)) / n_sessions)


async def run(home: Path, n_sessions: int, modules: list[str], *, warm: bool, name: str) -> list[float]:
    """Start a warden, and with `warm` a warm parent; returns the CPU seconds that each agent told."""
    command = [sys.executable, "agent.py"]
    told = []
    async with Services.open() as services:
        warden = Warden()
        await services.start(warden.run, name="warden", stop_s=STOP_S)

        async def sessions(parent: Child | None) -> None:
            for index in range(n_sessions):
                log = home / f"{name}-{index}.log"
                argv = command if warm else ["/bin/bash", "-c", " ".join(command)]
                async with warden.process(
                    argv=argv, cwd=home, env=os.environ, log_path=log, name=name, log_bytes=1 << 20, warm_parent=parent
                ) as child:
                    status = await child.wait_exit()
                assert status.returncode == 0, log.read_text()
                told.append(float(log.read_text()))

        if warm:
            log = home / "preload.log"
            async with warden.warm_parent(
                command=command, modules=modules, cwd=home, env=os.environ, log_path=log, name="warm"
            ) as parent:
                await sessions(parent)
        else:
            await sessions(None)
    return told


def cpu_of_children() -> float:
    """CPU seconds of all descendants that ended: the warden reaps all of its own before it ends."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(words: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--modules", default="openai", help="as in --agent-preload")
    parser.add_argument("--at-least", type=float, default=20.0, metavar="RATIO")
    options = parser.parse_args(None if words is None else list(words))
    modules = options.modules.split(",")
    with tempfile.TemporaryDirectory() as temp:
        home = Path(temp)
        (home / "agent.py").write_text(AGENT.format(imports="".join(f", {module}" for module in modules)))
        fresh = trio.run(lambda: measure(home, options.sessions, modules, warm=False))
        forked = trio.run(lambda: measure(home, options.sessions, modules, warm=True))
    for name, cost in (("afresh", fresh), ("forked", forked)):
        parts = f"agent {1e3 * cost.agent:.2f}, around it {1e3 * cost.around:.2f}"
        print(f"{name}: {1e3 * cost.total:.2f} ms CPU per Session ({parts})")
    ratio = fresh.total / forked.total
    what = f"{options.sessions} Sessions that import {options.modules}"
    print(f"{what}: forked from a warm parent they start with {ratio:.1f} times less CPU")
    return 0 if ratio >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
