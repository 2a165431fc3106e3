"""Agents forked from a warm parent: to themselves and to the run they are what a fresh process is."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
import trio
from builders_agents import failure, kept, launching, spec
from builders_checkpoint import save_tiny_checkpoint
from builders_commands import AGENT, command, run, write_rows
from builders_process import alive, eventually, new_tag, status_of

from relax_trio.errors import AgentLaunchError, ConfigError, EngineFault
from relax_trio.warden import tree

pytestmark = pytest.mark.process

PYTHON = sys.executable

REPORT = """
import gc, json, os, resource, signal, sys, threading
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
open_fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)]
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "executable": sys.executable,
    "flags": repr(sys.flags),
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "fds": sorted(map(int, open_fds)),
    "stdin": [os.readlink("/proc/self/fd/0"), sys.stdin.read()],
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "main": {name: repr(value).split(" at ")[0] for name, value in globals().items() if name not in ORDINARY},
    "main is this": sys.modules["__main__"].__dict__ is globals(),
    "handlers": {n: repr(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "masks": [int(status[name], 16) & 0x7FFF_FFFF for name in ("SigBlk", "SigIgn", "SigCgt")],  # above: the C library's
    "status": [status[name] for name in ("Umask", "Name", "NoNewPrivs", "Seccomp", "CapEff")],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "threads": [thread.name for thread in threading.enumerate()],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "limits": [resource.getrlimit(n) for n in range(16)],
    "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "ours": [name for name in sys.modules if name.startswith("relax_trio")],
    "module": sys.modules["plain"].__name__ if "plain" in sys.modules else "plain",
}))
""".replace("ORDINARY", '{"gc", "json", "os", "resource", "signal", "sys", "threading", "status", "open_fds"}')

MEDDLING = """
import os, signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.umask(0)
os.chdir("/")
os.environ["MEDDLED"] = "1"
os.environ.pop("GIVEN", None)
sys.argv.append("meddled")
descriptor = os.open("/dev/zero", os.O_RDONLY)
os.set_inheritable(descriptor, True)
joined = threading.Thread(target=int)
joined.start()
joined.join()
print("printed by a module", end="")
"""


async def log_of(tmp_path, command, **flags):
    """What one agent leaves: its exit status and its run.log."""
    async with launching(tmp_path, command, **flags) as launcher, launcher.open(spec()) as agent:
        status = await agent._child.wait_exit()
        return status, (agent.io_dir / "run.log").read_text()


def refused(match):
    """The engine does not start: its services end with this error."""
    return pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=match))


@pytest.fixture
def home(tmp_path):
    """A directory with agents in every form that a command may name, and with modules that can be preloaded."""
    (tmp_path / "plain.py").write_text("")
    (tmp_path / "meddling.py").write_text(MEDDLING)
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "inner.py").write_text(REPORT)
    (tmp_path / "sub" / "plain.py").write_text("")
    (tmp_path / "link.py").symlink_to("sub/inner.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text(REPORT)
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "__main__.py").write_text(REPORT)
    (tmp_path / "directory" / "plain.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (f"{PYTHON} report.py", {}),
        (f"{PYTHON} ./report.py -m 'two words' \"\" --x=1", {}),
        (f"{PYTHON} sub/inner.py", {}),
        (f"{PYTHON} link.py", {"agent_env_clear": True}),
        (f"{PYTHON} -m report a b", {}),
        (f"{PYTHON} -m package", {"agent_env": {"PYTHONUNBUFFERED": "1", "PYTHONPATH": "sub", "SHLVL": "5"}}),
        (f"{PYTHON} directory", {"agent_env": {"PYTHONSAFEPATH": "1"}}),
        (f"{PYTHON} -m package", {"agent_env": {"PYTHONSAFEPATH": "1", "PYTHONPATH": "."}}),
        (f"{PYTHON} report.py", {"agent_login_shell": True, "agent_env": {"HOME": "."}}),
        (f"{PYTHON} report.py", {"agent_env": {"GIVEN": "a \u00e9\udcff\n", "BASH_ENV": "startup.sh"}}),
    ],
)
async def test_a_fork_sees_what_a_fresh_process_sees(home, command, flags):
    (home / ".bash_profile").write_text("export FROM_PROFILE=yes; unset GIVEN; umask 022\n")
    (home / "startup.sh").write_text("export FROM_STARTUP=yes; unset OLDPWD\n")
    fresh_status, fresh = await log_of(home, command, **flags)
    forked_status, forked = await log_of(home, command, agent_preload=("plain",), **flags)
    assert forked_status == fresh_status
    assert fresh_status.code == 0, fresh
    expected, seen = json.loads(fresh), json.loads(forked)
    for report in (expected, seen):
        for name in ("RELAX_INPUT_JSON", "RELAX_OUTPUT_JSON", "RELAX_SESSION_IO_DIR", "RELAX_SESSION_ID"):
            assert report["environ"].pop(name)
    assert seen == expected


async def test_what_a_preloaded_module_changed_is_not_what_the_agent_gets(home):
    command, flags = f"{PYTHON} report.py", {"agent_env": {"GIVEN": "1"}}
    _, fresh = await log_of(home, command, **flags)
    _, forked = await log_of(home, command, agent_preload=("meddling",), **flags)
    expected, seen = json.loads(fresh), json.loads(forked)
    for report in (expected, seen):
        report["environ"] = {k: v for k, v in report["environ"].items() if not k.startswith("RELAX_")}
    assert seen == expected
    assert (home / "run" / "preload.log").read_text() == "printed by a module"


ENDS = {
    "falls off its end": "print('out', end='')",
    "exit status": "import sys; print('out'); sys.exit(7)",
    "exit message": "import sys; sys.exit('sorry')",
    "exit None": "raise SystemExit",
    "exit object": "raise SystemExit(3.5)",
    "exception": "def f():\n    return 1 / 0\n\nf()",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as exc:\n    raise ValueError('x') from exc",
    "exception group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "syntax error": "print('never')\nif True print",
    "own excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "at exit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\nprint('zero')",
    "file left open": "f = open('left.txt', 'w')\nf.write('kept')\nprint('x', flush=True)",
    "thread goes on": "import threading\ndef late():\n    event.wait(0.1)\n    print('late')\n"
    "event = threading.Event()\nthreading.Thread(target=late).start()\nprint('early')",
    "finalizer": "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'finalized')\n"
    "class B:\n    def __del__(self): print('deleted')\nb = B()",
    "own main": "import __main__, sys\nprint(__main__.__dict__ is globals(), __name__, __file__)\n"
    "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)",
    "fork": "import os\nif os.fork():\n    os.wait()\nprint('both')",
    "multiprocessing": "import multiprocessing as m\ndef f(x): return x + 1\n"
    "if __name__ == '__main__':\n    with m.get_context('spawn').Pool(1) as p: print(p.map(f, [1]))",
    "immediate exit": "import os\nprint('lost')\nos._exit(9)",
    "closed output": "import os\nos.close(1)\nos.close(2)\nprint('nowhere')",
}


@pytest.mark.parametrize("script", ENDS.values(), ids=ENDS.keys())
async def test_a_fork_ends_as_a_fresh_process_ends(tmp_path, script):
    (tmp_path / "plain.py").write_text("")
    (tmp_path / "agent.py").write_text(script)
    flags = {"agent_env_clear": True}  # PYTHONUNBUFFERED would hide what is not flushed
    fresh = await log_of(tmp_path, f"{PYTHON} agent.py", **flags)
    left = tmp_path / "left.txt"
    left_by_fresh = left.exists() and left.read_text()
    left.unlink(missing_ok=True)
    forked = await log_of(tmp_path, f"{PYTHON} agent.py", agent_preload=("plain",), **flags)
    if script == ENDS["interrupt"]:  # Python shows every frame of an interrupt, ours too
        fresh, forked = ((status, log.splitlines()[-3:]) for status, log in (fresh, forked))
    assert forked == fresh
    assert (left.exists() and left.read_text()) == left_by_fresh


@pytest.mark.parametrize("command", ["missing.py", "-m missing", "empty", "-m package"])
async def test_what_cannot_be_run_ends_as_it_does_in_a_fresh_process(home, command):
    (home / "package" / "__main__.py").unlink()
    (home / "empty").mkdir()
    (home / "empty" / "plain.py").write_text("")
    fresh = await log_of(home, f"{PYTHON} {command}")
    assert fresh[0].code in (1, 2)
    assert await log_of(home, f"{PYTHON} {command}", agent_preload=("plain",)) == fresh


async def test_forks_have_random_states_of_their_own_and_share_what_is_imported(tmp_path):
    (tmp_path / "shared.py").write_text("import os, random\npid = os.getpid()\nrandom.seed(1)\n")
    (tmp_path / "agent.py").write_text(
        "import numpy, os, random, shared\nprint(shared.pid != os.getpid(), random.random(), numpy.random.random())"
    )
    seen = []
    flags = {"agent_preload": ("shared,numpy",), "agent_env": {"OPENBLAS_NUM_THREADS": "1"}}
    async with launching(tmp_path, f"{PYTHON} agent.py", **flags) as launcher:
        for index in range(2):
            async with launcher.open(spec(index)) as agent:
                await agent.wait()
                seen.append(agent.log_tail().split())
    assert [words[0] for words in seen] == ["True", "True"]
    assert seen[0][1] != seen[1][1]
    assert seen[0][2] != seen[1][2]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "bad cannot be imported: ModuleNotFoundError: No module named 'bad'"),
        ("1 / 0", "bad cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "bad cannot be imported: SystemExit: 3"),
        (
            "import threading, time\nt = threading.Thread(target=time.sleep, args=(99,), name='busy', daemon=True)\n"
            "t.start()",
            r"bad starts threads \(busy\), and a fork has none of them",
        ),
        (
            "import _thread, time\n_thread.start_new_thread(time.sleep, (99,))",
            r"threads \(1 that Python does not know\)",
        ),
        ("import os; os._exit(4)", "the warm parent ended with exit code 4 before it was ready"),
        ("import os; os.kill(os.getpid(), 9)", "the warm parent ended with signal 9 before it was ready"),
    ],
)
async def test_a_module_that_cannot_be_preloaded_is_refused_by_name_at_the_start(tmp_path, source, said):
    (tmp_path / "good.py").write_text("")
    (tmp_path / "agent.py").write_text("")
    if source is not None:
        (tmp_path / "bad.py").write_text(source)
    with refused(f"^--agent-preload: .*{said}.*preload.log"):
        async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("good,bad",)):
            pytest.fail("started")


async def test_a_python_that_cannot_be_started_is_refused_at_the_start(tmp_path):
    with refused(r"--agent-preload: .*No such file or directory: '/nowhere'"):
        async with launching(tmp_path, f"{PYTHON} x.py", agent_preload=("os",), agent_cwd=Path("/nowhere")):
            pytest.fail("started")
    with refused("exit code 127 before it was ready"):
        async with launching(tmp_path, "python0.1 x.py", agent_preload=("os",)):
            pytest.fail("started")


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    tag = new_tag()
    (tmp_path / "slow.py").write_text("import subprocess\nsubprocess.run(['sleep', '1000'])\n")
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def start():
                async with launching(tmp_path, f"{PYTHON} agent.py {tag}", agent_preload=("slow",)):
                    pytest.fail("started")

            nursery.start_soon(start)
            await eventually(lambda: any(tree.children_of(pid) for pid in alive(tag)))
            scope.cancel()
    await eventually(lambda: alive(tag) == [])


# --- death of the warm parent ----------------------------------------------------------------------------------


def warm_pid(launcher):
    return launcher._warm_parent._start.parent.pid


async def test_death_of_the_warm_parent_leaves_agents_alone_and_the_next_session_has_a_new_one(tmp_path, events):
    (tmp_path / "agent.py").write_text(
        "import sys\nprint('up', flush=True)\nsys.stdin.read()\nimport time\ntime.sleep(99)"
    )
    async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("json",)) as launcher:
        async with launcher.open(spec(0)) as first:
            await eventually(lambda: "up" in first.log_tail())
            pid = warm_pid(launcher)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: [e.name for e in events if "warm" in e.name][1:] == ["warm_parent.failed"])
            assert status_of(pid) == {}
            async with launcher.open(spec(1)) as second:
                assert warm_pid(launcher) != pid
                await eventually(lambda: "up" in second.log_tail())
                assert first._child.exit_status is None
                assert status_of(first.pid)
        assert status_of(first.pid) == {}
        assert first._child.survivors == 0
    assert kept(tmp_path) == []
    assert [e.fields["error"] for e in events if e.name == "warm_parent.failed"] == ["it ended with signal 9 (SIGKILL)"]


async def test_a_session_whose_warm_parent_dies_while_it_forks_is_a_launch_error(tmp_path):
    (tmp_path / "fragile.py").write_text(
        "import os\nos.register_at_fork(before=lambda: os.path.exists('die') and os.kill(os.getpid(), 9))\n"
    )
    (tmp_path / "agent.py").write_text("print('fine')")
    async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("fragile",)) as launcher:
        (tmp_path / "die").touch()
        with pytest.raises(AgentLaunchError, match=r"session G17/0: its agent could not be started.*warm parent ended"):
            async with launcher.open(spec()):
                pytest.fail("entered")
        (tmp_path / "die").unlink()
        async with launcher.open(spec()) as agent:
            await agent.wait()
            assert agent.log_tail() == "fine\n"
    assert kept(tmp_path) == []


async def test_a_warm_parent_that_cannot_be_started_again_fails_the_sessions_that_want_it_until_it_can(tmp_path):
    (tmp_path / "moody.py").write_text("import os\nassert not os.path.exists('bad'), 'not today'\n")
    (tmp_path / "agent.py").write_text("")
    async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("moody",)) as launcher:
        (tmp_path / "bad").touch()
        parent = launcher._warm_parent._start.parent
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait_exit()
        for _ in range(2):
            with pytest.raises(AgentLaunchError, match=r"--agent-preload: moody cannot be imported: .* not today"):
                async with launcher.open(spec()):
                    pytest.fail("entered")
        (tmp_path / "bad").unlink()
        async with launcher.open(spec()) as agent:
            await agent.wait()


async def test_sessions_cancelled_while_they_wait_for_their_fork_leave_nothing(tmp_path):
    tag = new_tag()
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def wait():\n"
        "    open('waits', 'w').close()\n"
        "    while not os.path.exists('go'):\n"
        "        time.sleep(0.01)\n"
        "os.register_at_fork(before=wait)\n"
    )
    (tmp_path / "agent.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(99)")
    async with launching(tmp_path, f"{PYTHON} agent.py {tag}", agent_preload=("slow",)) as launcher:

        async def session(index):
            async with launcher.open(spec(index)):
                pytest.fail("entered a cancelled block")

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(session, index)
            await eventually((tmp_path / "waits").exists)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.sleep(0.1)  # for the ends to reach the warden before the fork; else the test is only weaker
            (tmp_path / "go").touch()
        assert alive(tag) == [warm_pid(launcher)]
        async with launcher.open(spec()) as agent:
            await eventually(lambda: agent.log_tail() == "up\n")
    assert alive(tag) == []


# --- nothing is left -------------------------------------------------------------------------------------------


async def test_a_keeper_that_is_killed_takes_its_forked_tree_with_it_and_no_other(tmp_path):
    tag = new_tag()
    (tmp_path / "agent.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            if not os.fork():
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(99)
            print(os.getppid(), flush=True)
            time.sleep(99)
            """
        )
    )
    async with launching(tmp_path, f"{PYTHON} agent.py {tag}", agent_preload=("json",)) as launcher:
        async with launcher.open(spec(0)) as other, launcher.open(spec(1)) as agent:
            await eventually(lambda: other.log_tail() and agent.log_tail())
            keeper = int(agent.log_tail())
            assert keeper != warm_pid(launcher)
            await eventually(lambda: keeper in tree.children_of(launcher._warden.pid))
            await eventually(lambda: len(alive(tag)) == 7)  # the warm parent, two keepers, two trees of two
            os.kill(keeper, signal.SIGKILL)
            assert (await agent._child.wait_exit()).signal == 9
            await eventually(lambda: len(alive(tag)) == 4)
            assert other._child.exit_status is None
            assert status_of(warm_pid(launcher))
        assert (other._child.survivors, agent._child.survivors) == (0, 0)
    assert alive(tag) == []


async def test_a_daemon_that_a_module_left_is_ended_and_its_warm_parent_is_not(tmp_path):
    tag = new_tag()
    (tmp_path / "leaving.py").write_text(
        "import os, time\n"
        "if not os.fork():\n"
        "    if not os.fork():\n"
        "        time.sleep(0.3)\n"  # an orphan by then
        "        os.execv('/bin/sleep', ['left', '99'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    (tmp_path / "agent.py").write_text("print('fine')")
    async with launching(tmp_path, f"{PYTHON} agent.py {tag}", agent_preload=("leaving",)) as launcher:
        parent = warm_pid(launcher)
        for index in range(2):
            async with launcher.open(spec(index)) as agent:
                await agent.wait()
        assert warm_pid(launcher) == parent
        await eventually(lambda: tree.children_of(launcher._warden.pid) == [parent])


async def test_death_of_the_warden_ends_forked_agents_and_their_warm_parent(tmp_path):
    tag = new_tag()
    (tmp_path / "agent.py").write_text("import os, time\nos.fork()\nprint('up', flush=True)\ntime.sleep(99)")
    fault = pytest.RaisesExc(EngineFault, match="the warden .*died")
    with pytest.RaisesGroup(fault, fault):  # of the warden's service and of the warm parent's
        async with (
            launching(tmp_path, f"{PYTHON} agent.py {tag}", agent_preload=("json",)) as launcher,
            launcher.open(spec()) as agent,
        ):
            await eventually(lambda: agent.log_tail().count("up") == 2)
            os.kill(launcher._warden.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await eventually(lambda: alive(tag) == [])
            await trio.sleep_forever()


async def test_a_hundred_forks_leave_no_descriptor_zombie_or_keeper(tmp_path):
    (tmp_path / "agent.py").write_text("import os\nos.fork() or os.setsid()")

    def n_open(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("json",)) as launcher:

        async def one(index):
            async with launcher.open(spec(index)) as agent:
                await agent.wait()

        await one(0)
        warden, parent = launcher._warden.pid, warm_pid(launcher)
        await eventually(lambda: tree.children_of(warden) == [parent])
        before = [n_open(pid) for pid in (os.getpid(), warden, parent)]
        for _ in range(4):
            async with trio.open_nursery() as nursery:
                for index in range(25):
                    nursery.start_soon(one, index)
        await eventually(lambda: tree.children_of(warden) == [parent])
        await eventually(lambda: [n_open(pid) for pid in (os.getpid(), warden, parent)] == before)
        assert tree.children_of(parent) == []
        assert warm_pid(launcher) == parent


async def test_what_cannot_be_started_after_the_fork_is_a_launch_error_too(tmp_path):
    (tmp_path / "agent.py").write_text("print('fine')")
    (tmp_path / "cwd").mkdir()
    flags = {"agent_preload": ("json",), "agent_cwd": tmp_path / "cwd"}
    async with launching(tmp_path, f"{PYTHON} ../agent.py", **flags) as launcher:
        (tmp_path / "cwd").rmdir()
        with pytest.raises(AgentLaunchError, match=r"session G17/0: its agent could not be started: .*/cwd'"):
            async with launcher.open(spec()):
                pytest.fail("entered")
        (tmp_path / "cwd").mkdir()
        async with launcher.open(spec()) as agent:
            await agent.wait()


async def test_a_forked_agent_that_fails_is_told_of_with_the_end_of_its_log(tmp_path):
    (tmp_path / "agent.py").write_text("print('before')\nraise RuntimeError('broken')")
    async with launching(tmp_path, f"{PYTHON} agent.py", agent_preload=("json",)) as launcher:
        error = await failure(launcher, spec(2))
    assert error.exit_code == 1
    assert str(error).endswith("RuntimeError: broken\n")
    assert "before\nTraceback (most recent call last):\n  File" in str(error)
    assert kept(tmp_path) == ["G17_2"]


# --- in a run --------------------------------------------------------------------------------------------------


def rollout(tmp_path, modules):
    """A rollout of four Sessions, forked from a warm parent with `modules`."""
    checkpoint, data = save_tiny_checkpoint(tmp_path / "tiny"), write_rows(tmp_path / "d.jsonl", 2)
    (tmp_path / "agent.py").write_text(AGENT.read_text())
    flags = ("--agent-command", f"{PYTHON} {tmp_path}/agent.py", "--agent-preload", modules, "--num-rollout", "1")
    return run(command("rollout", checkpoint, data, tmp_path / "run", *flags, "--keep-session-dirs", "always"))


def test_a_run_forks_its_agents(tmp_path):
    done = rollout(tmp_path, "http.client,json")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "sessions").glob("*/session_output.json"))) == 4
    assert "warm_parent.started" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.slow
def test_a_module_that_is_missing_ends_the_run_at_its_start(tmp_path):
    done = rollout(tmp_path, "json,no_such_module")
    assert done.returncode == 64
    assert "--agent-preload: no_such_module cannot be imported: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
