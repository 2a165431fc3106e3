"""The launcher of real agents: directory, environment, errors, output, and what is kept."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import trio
from builders_agents import failure, kept, launching, spec
from builders_process import alive, eventually, new_tag, running_warden, sleeper

from relax_trio.agent.launcher import ProcessAgentLauncher
from relax_trio.agent.session_io import LONG_BYTES, SessionIO
from relax_trio.config.tree import AgentConfig
from relax_trio.data.record import SessionOutput
from relax_trio.errors import AgentLaunchError, AgentOutputError
from relax_trio.ids import PlaceId

pytestmark = pytest.mark.process


async def test_agent_reads_its_task_and_writes_its_output(tmp_path):
    command = """
        pwd; echo "$RELAX_GROUP_ID $RELAX_ROLLOUT_MODE $RELAX_BASE_URL"; stat -c %a "$RELAX_SESSION_IO_DIR"
        cp "$RELAX_INPUT_JSON" "$RELAX_SESSION_IO_DIR/copy"; echo '{"reward": 0.5}' > "$RELAX_OUTPUT_JSON"
        cat "$RELAX_SESSION_IO_DIR/copy"
    """
    async with launching(tmp_path, command) as launcher, launcher.open(spec(metadata={"k": "\udcff"})) as agent:
        await agent.wait()
        assert await agent.read_output() == SessionOutput(reward=0.5, metadata={})
        lines = agent.log_tail().splitlines()
        assert lines[:3] == [str(tmp_path), "G17 train http://127.0.0.1:1/agentic_api", "700"]
        assert json.loads(lines[3]) == {
            "messages": [{"role": "user", "content": "2 + 2 = ?  é"}],
            "metadata": {"k": "\udcff"},
        }
        assert agent.io_dir.name.startswith("G17_0-")
    assert kept(tmp_path) == []


async def test_failing_agent_is_named_with_its_exit_code_and_the_end_of_its_log(tmp_path):
    command = "head -c 20000 /dev/zero | tr '\\0' x; echo; printf '\\xff last words'; exit 3"
    async with launching(tmp_path, command) as launcher:
        error = await failure(launcher, spec(2))
    assert re.match(r"session G17/2: the agent ended with exit code 3 after \d+\.\d s; the end of run.log", str(error))
    assert str(error).endswith("x\n\ufffd last words")
    assert error.exit_code == 3
    assert 8100 < len(error.tail) <= 8192
    assert kept(tmp_path) == ["G17_2"]
    assert {p.name for p in (tmp_path / "run/sessions/G17_2").iterdir()} == {"run.log", "session_input.json"}


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("kill -SEGV $$", -11, r"signal 11 \(SIGSEGV\)"),
        ("bash -c 'kill -9 $$'; exit $?", 137, r"exit code 137 \(a shell's word for signal 9 \(SIGKILL\)\)"),
        ("no-such-program", 127, r"exit code 127 after .*no-such-program: command not found"),
    ],
)
async def test_other_ends_are_told_in_words(tmp_path, command, code, said):
    async with launching(tmp_path, command, keep_session_dirs="never") as launcher:
        error = await failure(launcher, spec())
    assert error.exit_code == code
    assert re.search(said, str(error), re.DOTALL)
    assert kept(tmp_path) == []


async def test_the_credential_is_blotted_out_of_the_log_tail_even_when_cut_in_two(tmp_path):
    command = 'echo "start $RELAX_SESSION_ID"; for i in $(seq 600); do printf "$RELAX_SESSION_ID"; done; exit 1'
    the_spec = spec()
    async with launching(tmp_path, command) as launcher:
        error = await failure(launcher, the_spec)
    secret = the_spec.credential
    assert "<session id><session id>" in str(error)
    assert secret[:8] not in str(error)
    assert secret[-8:] not in str(error)


async def test_broken_output_is_an_error_with_the_log_tail(tmp_path):
    command = 'echo hello; echo "[]" > "$RELAX_OUTPUT_JSON"'
    async with launching(tmp_path, command) as launcher:
        error = await failure(launcher, spec())
    assert isinstance(error, AgentOutputError)
    assert str(error).startswith("session G17/0: session_output.json: record 1: a JSON array")
    assert str(error).endswith("hello\n")
    assert kept(tmp_path) == ["G17_0"]


@pytest.mark.parametrize("make", ["mkfifo", "mkdir", "ln -s /dev/zero"])
async def test_output_that_is_no_file_is_refused_without_reading_it(tmp_path, make):
    async with launching(tmp_path, f'{make} "$RELAX_OUTPUT_JSON"', keep_session_dirs="never") as launcher:
        error = await failure(launcher, spec())
    assert "session_output.json cannot be read: it is no regular file" in str(error)


async def test_unknown_key_is_warned_about_once_a_run(tmp_path, events):
    async with launching(tmp_path, """echo '{"scor": 1}' > "$RELAX_OUTPUT_JSON" """) as launcher:
        for index in range(2):
            async with launcher.open(spec(index)) as agent:
                await agent.wait()
                assert (await agent.read_output()).reward is None
    assert [e.fields for e in events if e.name == "output.unknown_key"] == [{"place": "G17/0", "key": "scor"}]


async def test_long_input_and_output_go_through(tmp_path):
    text = "x" * (2 * LONG_BYTES)
    command = """printf '{"metadata": ' > "$RELAX_OUTPUT_JSON"; cat "$RELAX_INPUT_JSON" >> "$RELAX_OUTPUT_JSON"
        echo } >> "$RELAX_OUTPUT_JSON" """
    async with launching(tmp_path, command) as launcher, launcher.open(spec(content=text)) as agent:
        await agent.wait()
        output = await agent.read_output()
    assert output.metadata["messages"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"agent_cwd": Path("/nowhere")}, "session G17/0: its agent could not be started: .*'/nowhere'"),
        ({"agent_env": {"A": "x" * 3_000_000}}, "session G17/0: its agent could not be started: .*too long"),
    ],
)
async def test_agent_that_cannot_be_started_is_a_launch_error(tmp_path, flags, said):
    async with launching(tmp_path, "true", **flags) as launcher:
        with pytest.raises(AgentLaunchError, match=said):
            async with launcher.open(spec()):
                pass
    assert kept(tmp_path) == []


async def test_directory_that_cannot_be_made_is_a_launch_error(tmp_path):
    async with running_warden() as warden:
        launcher = ProcessAgentLauncher(warden, AgentConfig(agent_command="true"), tmp_path, tmp_path / "missing")
        with pytest.raises(AgentLaunchError, match="session G17/0: its IO directory could not be made"):
            async with launcher.open(spec()):
                pass


async def test_without_a_command_there_is_nothing_to_open(tmp_path):
    async with launching(tmp_path, None) as launcher:
        with pytest.raises(AgentLaunchError, match="session G17/0: --agent-command is missing"):
            async with launcher.open(spec()):
                pass


async def test_login_shell_reads_login_files(tmp_path, monkeypatch):
    (tmp_path / ".bash_profile").write_text("echo from the profile\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for login, said in ((True, "from the profile\nhere\n"), (False, "here\n")):
        async with (
            launching(tmp_path, "echo here", agent_login_shell=login) as launcher,
            launcher.open(spec()) as agent,
        ):
            await agent.wait()
            assert agent.log_tail().endswith(said)
            assert ("profile" in agent.log_tail()) == login


async def test_cancelled_session_ends_its_agent_and_keeps_nothing(tmp_path):
    tag = new_tag()
    async with launching(tmp_path, f"({sleeper(tag)}) & wait") as launcher:
        with trio.CancelScope() as scope:
            async with launcher.open(spec()) as agent:
                await eventually(lambda: alive(tag))
                scope.cancel()
                await agent.wait()
        assert scope.cancelled_caught
        assert alive(tag) == []
    assert kept(tmp_path) == []


async def test_marked_and_repeated_failures_are_kept_side_by_side(tmp_path, events):
    async with launching(tmp_path, "sleep 1000") as launcher:
        for _ in range(3):
            async with launcher.open(spec(1)) as agent:
                agent.mark_failed()
    assert kept(tmp_path) == ["G17_1", "G17_1-2", "G17_1-3"]
    assert [e.fields["path"] for e in events if e.name == "session_dir.kept"] == [
        str(tmp_path / "run/sessions" / name) for name in kept(tmp_path)
    ]


async def test_always_keeps_successful_sessions_too(tmp_path):
    async with launching(tmp_path, "true", keep_session_dirs="always") as launcher, launcher.open(spec()) as agent:
        await agent.wait()
    assert kept(tmp_path) == ["G17_0"]


async def test_trees_that_agents_leave_in_their_directory_are_removed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("")
    command = """cd "$RELAX_SESSION_IO_DIR"; mkdir -p a/b locked/in; touch a/b/c locked/in/d; ln -s $OLDPWD/outside link
        for i in $(seq 30); do touch f$i; done; chmod 0 locked/in locked"""
    async with launching(tmp_path, command) as launcher, launcher.open(spec()) as agent:
        await agent.wait()
    assert [p.name for p in outside.iterdir()] == ["file"]


async def test_directory_moves_across_file_systems(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("relax_trio.agent.session_io.os.rename", refuse)
    root = tmp_path / "root"
    root.mkdir()
    io = await SessionIO.make(root, PlaceId("E1/0"), {"metadata": {"a": 1}})
    os.mkfifo(io.path / "pipe")
    (io.path / "sub").mkdir()
    target = await io.keep(tmp_path / "sessions")
    assert target == tmp_path / "sessions" / "E1_0"
    assert {p.name for p in target.iterdir()} == {"session_input.json", "sub"}
    assert list(root.iterdir()) == []


async def test_what_cannot_be_kept_is_told(tmp_path, events):
    io = await SessionIO.make(tmp_path, PlaceId("E1/0"), {})
    (tmp_path / "file").write_text("")
    assert await io.keep(tmp_path / "file" / "sessions") is None
    assert [e.name for e in events] == ["session_dir.left"]
    assert io.path.exists()


async def test_thirty_two_sessions_at_once_leave_nothing(tmp_path):
    command = """echo '{"reward": 1}' > "$RELAX_OUTPUT_JSON"; setsid -f sleep 1000; sleep 1000 & exit 0"""
    rewards = []
    async with launching(tmp_path, command) as launcher:

        async def session(index):
            async with launcher.open(spec(index)) as agent:
                await agent.wait()
                rewards.append((await agent.read_output()).reward)

        async with trio.open_nursery() as nursery:
            for index in range(32):
                nursery.start_soon(session, index)
    assert rewards == [1.0] * 32
    assert kept(tmp_path) == []
