"""Agents that misbehave, started afresh and forked from a warm parent alike: they end, alone, and leave nothing."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest
import trio
from builders_agents import failure, kept, launching, spec
from builders_process import alive, eventually, new_tag, status_of

from relax_trio.data.record import SessionOutput
from relax_trio.errors import AgentOutputError

pytestmark = pytest.mark.process

LOG_BYTES = 65536


@pytest.fixture(params=["afresh", "forked"])
def launch(request, tmp_path):
    """Opens a launcher whose agents run a script; the tag is in the command line of the agent and its descendants."""
    tag = new_tag()

    def launching_script(script, **flags):
        (tmp_path / "agent.py").write_text(textwrap.dedent(script))
        flags = {"keep_session_dirs": "never", "agent_log_bytes": LOG_BYTES, **flags}
        if request.param == "forked":
            flags["agent_preload"] = ("json,signal",)
        return launching(tmp_path, f"{sys.executable} agent.py {tag}", **flags)

    def living():
        """Living processes of agents: neither the warm parent nor a keeper that it forked."""
        return [pid for pid in alive(tag) if status_of(pid).get("Name") not in (None, "relax-keeper") and not warm(pid)]

    def warm(pid):
        return status_of(int(status_of(pid).get("PPid", 0))).get("Name") == "relax-warden"

    launching_script.living = living
    yield launching_script
    assert alive(tag) == []


async def test_a_tree_that_ignores_sigterm_is_killed_after_the_grace(launch):
    script = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        os.fork()
        print("up", flush=True)
        while True:
            signal.pause()
    """
    async with launch(script, agent_term_grace=0.4) as launcher:
        async with launcher.open(spec()) as agent:
            await eventually(lambda: agent.log_tail().count("up") == 4)
            started_s = trio.current_time()
        assert trio.current_time() - started_s >= 0.4
        assert (agent._child.survivors, agent._child.exit_status.signal) == (0, 9)
        assert launch.living() == []


async def test_descendants_in_groups_and_sessions_of_their_own_are_ended(launch):
    script = """
        import os, signal, sys
        def fork(*calls):
            if os.fork() == 0:
                for call in calls:
                    call()
                print("up", flush=True)
                signal.pause()
        def fork_away():
            if os.fork():
                os._exit(0)
        fork(os.setpgrp)
        fork(os.setsid)
        fork(os.setsid, fork_away)
        fork(os.setsid, fork_away, os.environ.clear, lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        fork(lambda: os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(99)", sys.argv[1]], {}))
    """
    async with launch(script) as launcher:
        async with launcher.open(spec()) as agent:
            await agent.wait()
            await eventually(lambda: agent.log_tail().count("up") == 4 and len(launch.living()) == 5)
        assert agent._child.survivors == 0
        assert launch.living() == []


async def test_stopped_processes_are_woken_to_end_and_killed_where_they_do_not(launch):
    script = """
        import os, signal, sys
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("woken")))
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    """
    async with launch(script, agent_term_grace=1.0) as launcher:
        async with launcher.open(spec()) as agent:
            stopped = ["T (stopped)"] * 2
            await eventually(lambda: [status_of(pid).get("State") for pid in launch.living()] == stopped)
        assert agent._child.exit_status.code == 0
        assert agent._child.survivors == 0


async def test_an_agent_that_stops_its_keeper_is_ended_all_the_same(launch):
    script = """
        import os, signal, time
        os.kill(os.getppid(), signal.SIGSTOP)
        print(os.getppid(), flush=True)
        time.sleep(99)
    """
    async with launch(script) as launcher:
        async with launcher.open(spec()) as agent:
            await eventually(agent.log_tail)  # it comes through the keeper
        assert agent._child.survivors == 0
        assert launch.living() == []


async def test_a_storm_of_forks_is_ended(launch):
    script = """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for n in range(5):
            if os.fork() == 0 and n % 2:
                os.setsid()
        print("up", flush=True)
        while True:  # 32 processes that all go on to fork children, whose children are orphans at once
            try:
                if os.fork() == 0:
                    os.fork()
                    os._exit(0)
            except OSError:
                pass
    """
    async with launch(script) as launcher:
        async with launcher.open(spec()) as agent:
            await eventually(lambda: agent.log_tail().count("up") == 32, within_s=30)
        assert agent._child.survivors == 0
        assert launch.living() == []


async def test_an_agent_that_closes_its_output_goes_on_and_finishes(launch):
    script = """
        import os, sys, time
        print("before", flush=True)
        for fd in (0, 1, 2):
            os.close(fd)
        while not os.path.exists("go"):
            time.sleep(0.01)
        with open(os.environ["RELAX_OUTPUT_JSON"], "w") as file:
            file.write('{"reward": 1}')
    """
    async with launch(script) as launcher, launcher.open(spec()) as agent:
        await eventually(lambda: agent.log_tail() == "before\n")
        (launcher._config.agent_cwd / "go").touch()
        await agent.wait()
        assert await agent.read_output() == SessionOutput(reward=1.0, metadata={})


async def test_a_flooded_log_stays_within_its_limit_and_keeps_its_start_and_its_end(launch):
    script = """
        import sys
        for n in range(60_000):
            sys.stdout.write(f"line {n}\\n")
        print("last words", file=sys.stderr)
    """
    written = sum(len(f"line {n}\n") for n in range(60_000)) + len("last words\n")
    sizes = []
    async with launch(script) as launcher, launcher.open(spec()) as agent:
        log = agent.io_dir / "run.log"
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def watch():
                while True:
                    sizes.append(log.stat().st_size)
                    await trio.sleep(0.002)

            await agent.wait()
            nursery.cancel_scope.cancel()
        text = log.read_text()
        assert agent.log_tail().endswith("line 59999\nlast words\n")
    assert max(sizes) <= LOG_BYTES
    assert text.startswith("line 0\nline 1\n")
    (left_out,) = re.findall(r"\n\[… +(\d+) bytes left out …\]\n", text)
    cut = re.sub(r"\n\[… +\d+ bytes left out …\]\n", "", text)
    assert len(cut) + int(left_out) == written


async def test_a_daemon_that_floods_the_log_keeps_nobody_from_ending(launch):
    script = """
        import os, signal
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                os.write(1, b"x" * 100_000)
        print("parent", flush=True)
    """
    async with launch(script) as launcher:
        async with launcher.open(spec()) as agent:
            await agent.wait()
            log = agent.io_dir / "run.log"
            await eventually(lambda: b"left out" in log.read_bytes())
            assert log.stat().st_size <= LOG_BYTES
        assert agent._child.survivors == 0
        assert launch.living() == []


async def test_what_is_written_on_sigterm_is_in_the_log(launch):
    script = """
        import signal, sys
        def end(*_):
            sys.stdout.write("y" * 300_000)
            sys.exit("bye")
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        signal.pause()
    """
    async with launch(script, agent_term_grace=5.0) as launcher:
        async with launcher.open(spec()) as agent:
            await eventually(lambda: agent.log_tail() == "up\n")
            agent.mark_failed()
            launcher._config = launcher._config.__class__(agent_command="-", keep_session_dirs="failed")
        assert agent._child.exit_status.code == 1
        log = (launcher._keep_dir / "G17_0" / "run.log").read_text()
        assert log.startswith("up\nyyy")
        assert log.endswith("yyybye\n")


async def test_half_an_output_file_fails_the_session_and_no_other(launch):
    script = """
        import os, sys
        with open(os.environ["RELAX_OUTPUT_JSON"], "w") as file:
            file.write('{"reward": 0.')
            if os.path.exists("crash"):
                file.flush()
                os.kill(os.getpid(), 9)
    """
    async with launch(script) as launcher, launcher.open(spec(1)) as other:
        error = await failure(launcher, spec())
        assert isinstance(error, AgentOutputError)
        assert str(error).startswith("session G17/0: session_output.json:")
        (launcher._config.agent_cwd / "crash").touch()
        error = await failure(launcher, spec())
        assert error.exit_code == -9
        assert "session_output" not in str(error)
        await other.wait()


async def test_an_agent_that_exits_at_once_is_finished_and_says_nothing(launch, tmp_path):
    async with launch("raise SystemExit(0)") as launcher, launcher.open(spec()) as agent:
        await agent.wait()
        assert await agent.read_output() == SessionOutput(metadata={})
        assert agent.log_tail() == ""
    assert kept(tmp_path) == []


async def test_an_agent_that_kills_whatever_it_can_reach_by_its_group_disturbs_no_other(launch):
    script = """
        import os, signal, sys, time
        if os.path.exists("kill"):
            os.kill(0, signal.SIGKILL)
        print("up", flush=True)
        time.sleep(99)
    """
    async with launch(script) as launcher:
        async with launcher.open(spec(1)) as other:
            await eventually(lambda: other.log_tail() == "up\n")
            (launcher._config.agent_cwd / "kill").touch()
            for _ in range(2):
                assert (await failure(launcher, spec())).exit_code == -9
            assert other._child.exit_status is None
        assert other._child.survivors == 0
