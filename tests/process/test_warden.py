"""The warden with real processes: what it starts, what it tells, and that nothing it owned is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio
from builders_process import alive, eventually, is_alone, new_tag, running_warden, shell, sleeper, status_of

from relax_trio.errors import EngineFault
from relax_trio.sync.process import ExitStatus, Warden
from relax_trio.warden import tree

pytestmark = pytest.mark.process


# --- starting and telling --------------------------------------------------------------------------------------


async def test_process_gets_directory_environment_null_stdin_and_log(tmp_path):
    script = 'pwd; echo "$WORD"; env | cut -d= -f1 | sort | tr "\\n" " "; cat; echo oops >&2; exit 3'
    env = {"WORD": "a  b \u00e9\udcff", "PATH": os.environ["PATH"]}
    (tmp_path / "run.log").write_text("before\n")
    async with running_warden() as warden, shell(warden, script, tmp_path, env=env) as child:
        status = await child.wait_exit()
        assert status == ExitStatus(code=3)
        assert status.returncode == 3
        assert str(status) == "exit code 3"
    log = (tmp_path / "run.log").read_bytes()
    assert log == (b"before\n" + os.fsencode(tmp_path) + b"\na  b \xc3\xa9\xff\nPATH PWD SHLVL WORD _ oops\n")


async def test_process_leads_a_session_and_its_signals_have_default_actions(tmp_path):
    script = "grep -E '^(SigIgn|SigBlk)' /proc/self/status; ps -o sid=,pgid= -p $$"
    async with running_warden() as warden, shell(warden, script, tmp_path) as child:
        assert (await child.wait_exit()).code == 0
        fields = (tmp_path / "run.log").read_text().split()
        assert (fields[0], fields[2]) == ("SigBlk:", "SigIgn:")
        assert int(fields[1], 16) == 0
        assert int(fields[3], 16) & 0x7FFF_FFFF == 0  # above are the C library's own
        assert fields[4:] == [str(child.pid), str(child.pid)]


async def test_death_by_signal_is_told_with_its_name(tmp_path):
    async with running_warden() as warden, shell(warden, "kill -9 $$", tmp_path) as child:
        status = await child.wait_exit()
    assert (status.code, status.signal, status.returncode) == (None, 9, -9)
    assert str(status) == "signal 9 (SIGKILL)"


async def test_processes_inherit_no_descriptors(tmp_path):
    leaky = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaky, True)
    script = 'for fd in /proc/$$/fd/*; do [ -e "$fd" ] && basename $fd; done; sleep 1000'
    try:
        async with running_warden() as warden, trio.open_nursery() as nursery:

            async def look(n):
                async with shell(warden, script, tmp_path, log=f"{n}.log"):
                    await eventually(lambda: len((tmp_path / f"{n}.log").read_text().split()) >= 3)

            for n in range(4):
                nursery.start_soon(look, n)
    finally:
        os.close(leaky)
    for n in range(4):
        assert set((tmp_path / f"{n}.log").read_text().split()) == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("change", "number", "filename"),
    [
        ({"cwd": Path("/nowhere/here")}, errno.ENOENT, "/nowhere/here"),
        ({"argv": ["/nowhere/program"]}, errno.ENOENT, "/nowhere/program"),
        ({"argv": ["/etc/passwd"]}, errno.EACCES, "/etc/passwd"),
        ({"argv": ["/bin/bash", "-c", "x" * 200_000]}, errno.E2BIG, "/bin/bash"),
        ({"cwd": Path("/" + "\u00e9" * 3000)}, errno.ENAMETOOLONG, "/" + "\u00e9" * 999),
        ({"env": {"A": "nul\0"}}, errno.EINVAL, "embedded null byte"),
        ({"log_path": Path("/nowhere/log")}, errno.ENOENT, "/nowhere/log"),
    ],
)
async def test_what_cannot_be_started_raises_oserror_and_leaves_nothing(tmp_path, change, number, filename):
    arguments = {
        "argv": ["/bin/true"],
        "cwd": tmp_path,
        "env": {},
        "log_path": tmp_path / "log",
        "name": "test",
        "term_grace_s": 0.2,
    }
    async with running_warden() as warden:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - errno is compared below
            async with warden.process(**{**arguments, **change}):
                pass
        assert (caught.value.errno, caught.value.filename) == (number, filename)
        assert warden.n_processes == 0
        await eventually(lambda: tree.children_of(warden.pid) == [])


async def test_leader_stays_a_zombie_until_its_block_is_left(tmp_path):
    async with running_warden() as warden:
        async with shell(warden, "exit 0", tmp_path) as child:
            await child.wait_exit()
            assert status_of(child.pid)["State"].startswith("Z")
        assert status_of(child.pid) == {}
        assert child.survivors == 0


async def test_orphans_of_a_running_process_are_reaped(tmp_path):
    script = "for i in 1 2 3 4 5; do (true &) ; done; echo done; sleep 1000"
    async with running_warden() as warden, shell(warden, script, tmp_path) as child:
        await eventually(lambda: "done" in (tmp_path / "run.log").read_text())
        keeper = int(status_of(child.pid)["PPid"])
        await eventually(lambda: tree.children_of(keeper) == [child.pid])


# --- ending ----------------------------------------------------------------------------------------------------


async def test_polite_tree_ends_within_its_grace(tmp_path):
    script = "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done"
    async with running_warden() as warden:
        async with shell(warden, script, tmp_path, grace_s=10) as child:
            await eventually(lambda: "up" in (tmp_path / "run.log").read_text())
            started_s = trio.current_time()
        assert trio.current_time() - started_s < 5
        assert 0 <= child.end_s < 5
        assert child.exit_status == ExitStatus(code=5)
        assert (tmp_path / "run.log").read_text().endswith("bye\n")


async def test_tree_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    tag = new_tag()
    script = f"trap '' TERM; (sleep 1000; echo {tag}) & bash -c 'sleep 1000; : {tag}'; echo never"
    async with running_warden() as warden:
        async with shell(warden, script, tmp_path, grace_s=0.3) as child:
            await eventually(lambda: len(alive(tag)) == 3)
            started_s = trio.current_time()
        seconds = trio.current_time() - started_s
    assert 0.3 <= seconds < 5
    assert alive(tag) == []
    assert child.exit_status == ExitStatus(signal=9)
    assert (tmp_path / "run.log").read_text() == ""


async def test_grandchild_that_outlives_a_clean_leader_is_ended(tmp_path):
    tag = new_tag()
    async with running_warden() as warden:
        async with shell(warden, f"({sleeper(tag)}) & exit 0", tmp_path) as child:
            assert (await child.wait_exit()).code == 0
            await eventually(lambda: alive(tag))
        assert alive(tag) == []


async def test_daemons_in_sessions_of_their_own_belong_to_their_process_alone(tmp_path):
    tags = [new_tag(), new_tag()]
    scripts = [
        f"env -i PATH=$PATH setsid -f bash -c \"(trap '' TERM; {sleeper(tag)}) & exit 0\"; exit 0" for tag in tags
    ]
    async with running_warden() as warden, shell(warden, scripts[0], tmp_path) as first:
        async with shell(warden, scripts[1], tmp_path) as second:
            await first.wait_exit()
            await second.wait_exit()
            await eventually(lambda: all(is_alone(tag) for tag in tags))
            (daemon,) = alive(tags[1])
            assert os.getsid(daemon) not in (second.pid, first.pid)
        assert alive(tags[1]) == []
        assert len(alive(tags[0])) == 1
    assert alive(tags[0]) == []


async def test_stopped_processes_wake_for_sigterm_and_die(tmp_path):
    tag = new_tag()
    script = f"trap 'echo woken; exit 1' TERM; ({sleeper(tag)}) & kill -STOP $! $$; wait"
    async with running_warden() as warden:
        async with shell(warden, script, tmp_path, grace_s=5) as child:
            await eventually(lambda: status_of(child.pid)["State"].startswith("T") and alive(tag))
        assert alive(tag) == []
        assert (tmp_path / "run.log").read_text() == "woken\n"
        assert child.exit_status == ExitStatus(code=1)


async def test_processes_that_fork_away_or_respawn_each_other_are_caught(tmp_path):
    tag = new_tag()
    hop = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nwhile True:\n    if os.fork(): os._exit(0)\n"
    guard = (
        "import os, signal\nsignal.signal(15, signal.SIG_IGN)\n"
        "while True:\n    child = os.fork()\n    if child: os.waitpid(child, 0)\n"
        "    else: os.setsid(); signal.pause()\n"
    )
    script = f'"$PYTHON" -S -c "{hop}" {tag} & "$PYTHON" -S -c "{guard}" {tag} & sleep 1000'
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    async with running_warden() as warden:
        async with shell(warden, script, tmp_path, env=env) as child:
            await eventually(lambda: len(alive(tag)) >= 3)
        assert child.survivors == 0
        assert alive(tag) == []
    assert (tmp_path / "run.log").read_text() == ""


async def test_cancelled_block_ends_its_tree_before_it_is_left(tmp_path):
    tag = new_tag()
    async with running_warden() as warden:
        with trio.CancelScope() as scope:
            async with shell(warden, f"trap '' TERM; {sleeper(tag)}", tmp_path):
                await eventually(lambda: alive(tag))
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert alive(tag) == []


async def test_block_cancelled_while_it_starts_leaves_nothing(tmp_path):
    tag = new_tag()
    async with running_warden() as warden:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with shell(warden, sleeper(tag), tmp_path):
                pytest.fail("entered a cancelled block")
        assert scope.cancelled_caught
        assert warden.n_processes == 0
        assert alive(tag) == []
        await eventually(lambda: tree.children_of(warden.pid) == [])


async def test_hurry_kills_everything_at_once_and_refuses_more(tmp_path):
    tag = new_tag()
    async with running_warden() as warden:
        async with shell(warden, f"trap '' TERM; ({sleeper(tag)}) & wait", tmp_path, grace_s=15) as child:
            await eventually(lambda: len(alive(tag)) == 2)
            warden.hurry()
            warden.hurry()
            started_s = trio.current_time()
            assert await child.wait_exit() == ExitStatus(signal=9)
            with pytest.raises(OSError, match="warden is closing"):
                async with shell(warden, "true", tmp_path):
                    pass
        assert trio.current_time() - started_s < 5
        assert alive(tag) == []
        assert status_of(warden.pid) == {} or status_of(warden.pid)["State"].startswith("Z")


async def test_hundred_processes_leave_no_descriptor_zombie_or_keeper(tmp_path):
    def n_open(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    async with running_warden() as warden:

        async def one(n):
            async with shell(warden, "sleep 1000 & exit 0", tmp_path, log=f"{n}.log") as child:
                assert (await child.wait_exit()).code == 0

        await one(0)
        await eventually(lambda: tree.children_of(warden.pid) == [])
        before = (n_open(os.getpid()), n_open(warden.pid))
        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for n in range(25):
                    nursery.start_soon(one, n)
        await eventually(lambda: tree.children_of(warden.pid) == [])
        await eventually(lambda: (n_open(os.getpid()), n_open(warden.pid)) == before)
        assert warden.n_processes == 0


# --- violent ends ----------------------------------------------------------------------------------------------


async def test_warden_ignores_the_signals_of_terminals_and_supervisors(tmp_path):
    async with running_warden() as warden:
        assert os.getsid(warden.pid) == warden.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(warden.pid, number)
        async with shell(warden, "exit 7", tmp_path) as child:
            assert (await child.wait_exit()).code == 7


async def test_killed_keeper_takes_its_tree_with_it_and_no_other(tmp_path):
    tags = [new_tag(), new_tag()]
    async with running_warden() as warden, shell(warden, sleeper(tags[0]), tmp_path) as other:
        async with shell(warden, f"setsid -f bash -c '{sleeper(tags[1])}'; sleep 1000", tmp_path) as child:
            await eventually(lambda: len(alive(tags[1])) >= 1 and alive(tags[0]))
            os.kill(int(status_of(child.pid)["PPid"]), signal.SIGKILL)
            assert await child.wait_exit() == ExitStatus(signal=9)
            await eventually(lambda: alive(tags[1]) == [])
        assert child.survivors == 0
        assert other.exit_status is None
        assert len(alive(tags[0])) == 1


async def test_agent_that_stops_its_keeper_is_ended_all_the_same(tmp_path):
    tag = new_tag()
    async with running_warden() as warden:
        async with shell(warden, f"kill -STOP $PPID; {sleeper(tag)}", tmp_path, grace_s=5) as child:
            await eventually(lambda: os.readlink(f"/proc/{child.pid}/exe").endswith("sleep"))
            keeper = int(status_of(child.pid)["PPid"])
            await eventually(lambda: status_of(keeper)["State"].startswith("S"))
        assert child.exit_status == ExitStatus(signal=15)
        assert alive(tag) == []


async def test_warden_killed_with_reports_unread_takes_every_process_with_it(tmp_path):
    tag = new_tag()
    with pytest.RaisesGroup(EngineFault):
        async with running_warden() as warden, shell(warden, f"({sleeper(tag)}) & wait", tmp_path) as child:
            await eventually(lambda: alive(tag))
            os.kill(warden.pid, signal.SIGSTOP)
            os.kill(child.pid, signal.SIGKILL)  # its keeper tells the warden, which does not listen
            await eventually(lambda: status_of(child.pid)["State"].startswith("Z"))
            await trio.sleep(0.2)  # for the keeper to say so; too short would only make the test weaker
            os.kill(warden.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await eventually(lambda: alive(tag) == [])
            await trio.sleep_forever()


async def test_killed_warden_takes_every_process_with_it_and_is_a_fault_of_the_engine(tmp_path):
    tag = new_tag()
    waiters = []
    script = f"(env -i PATH=$PATH setsid bash -c \"trap '' TERM; {sleeper(tag)}\") & trap '' TERM; wait"
    with pytest.RaisesGroup(pytest.RaisesExc(EngineFault, match=r"the warden \(pid \d+\) died, status -9")):
        async with running_warden() as warden, shell(warden, script, tmp_path) as child:
            await eventually(lambda: alive(tag))
            os.kill(warden.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True), trio.fail_after(20):
                try:
                    await child.wait_exit()
                except EngineFault as exc:
                    waiters.append(str(exc))
                await eventually(lambda: alive(tag) == [])
            with pytest.raises(EngineFault, match="does not run"):
                async with shell(warden, "true", tmp_path):
                    pass
    assert waiters == ["process test: the warden died, and with it every process it owned"]


def engine_script(tag: str, log: Path, *, forked_copy: bool) -> str:
    """An engine with eight agents that each have a grandchild in a session of its own."""
    agent = f"(env -i setsid bash -c \"trap '' TERM; {sleeper(tag)}\") & trap '' TERM; sleep 1000; : {tag}"
    return textwrap.dedent(
        f"""
        import os, time, trio
        from pathlib import Path
        from relax_trio.sync.process import Warden
        from relax_trio.sync.services import Services

        async def main():
            async with Services.open() as services, trio.open_nursery() as nursery:
                warden = Warden()
                await services.start(warden.run, name="warden")
                for n in range(8):
                    nursery.start_soon(agent, warden, n)
                copy = {"os.fork()" if forked_copy else "-1"}
                if copy == 0:
                    time.sleep(60)
                    os._exit(0)
                print(warden.pid, copy, flush=True)
                await trio.sleep_forever()

        async def agent(warden, n):
            async with warden.process(
                argv=["/bin/bash", "-c", {agent!r}], cwd=Path("/"), env=dict(os.environ),
                log_path=Path({str(log)!r}), name=f"agent {{n}}",
            ):
                await trio.sleep_forever()

        trio.run(main)
        """
    )


@pytest.mark.parametrize("forked_copy", [False, True])
async def test_sigkill_of_the_engine_leaves_no_process(tmp_path, forked_copy):
    tag = new_tag()
    script = tmp_path / "engine.py"
    script.write_text(engine_script(tag, tmp_path / "log", forked_copy=forked_copy))
    engine = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    copy_pid = -1
    try:
        warden_pid, copy_pid = map(int, engine.stdout.readline().split())
        await eventually(lambda: len(alive(tag)) == 16)
        keepers = tree.children_of(warden_pid)
        assert len(keepers) == 8
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()
    await eventually(lambda: alive(tag) == [], within_s=10)
    await eventually(lambda: not any(status_of(pid) for pid in (warden_pid, *keepers)), within_s=10)
    if forked_copy:
        assert status_of(copy_pid)["State"].startswith("S")
        os.kill(copy_pid, signal.SIGKILL)


def test_children_are_found_without_the_kernels_children_files(monkeypatch):
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert child.pid in tree.children_of(os.getpid())
        monkeypatch.setattr(tree, "_HAS_CHILDREN_FILES", False)
        assert child.pid in tree.children_of(os.getpid())
        assert tree.children_of(child.pid) == []
    finally:
        child.kill()
        child.wait()


async def test_program_that_cannot_start_is_an_error_at_the_start(monkeypatch):
    monkeypatch.setattr("relax_trio.sync.process._command", lambda fd: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(EngineFault, match="status 3"):
        await Warden().run()
