"""The fake agent keeps the contract of a real one, on the virtual clock."""

from __future__ import annotations

import pytest
import trio

from relax_trio.agent.base import AgentSpec
from relax_trio.agent.fake import AgentExit, FakeAgentLauncher, FakeEnd
from relax_trio.data.messages import Message
from relax_trio.data.record import SessionOutput
from relax_trio.data.task import TaskInput
from relax_trio.errors import AgentExecutionError, AgentLaunchError, AgentOutputError
from relax_trio.ids import Credential, GroupId, PlaceId


def spec(place="G1/0"):
    task = TaskInput(
        row=0, source="f:1", prompt="hi", messages=(Message(role="user", content="hi"),), metadata={"n": 1}
    )
    return AgentSpec(
        place=PlaceId(place),
        group=GroupId("G1"),
        credential=Credential("rs-x"),
        base_url="http://x/agentic_api",
        mode="train",
        task=task,
    )


async def test_agent_gets_its_input_and_hands_back_its_output(autojump_clock):
    seen = []

    async def agent(me):
        seen.append((me.session_input, me.env["RELAX_SESSION_ID"], me.client))
        await trio.sleep(7)
        me.write_output({"reward": 1.0, "metadata": {"a": 2}})

    launcher = FakeAgentLauncher(agent, client="client", start_s=2, end_s=3)
    async with launcher.open(spec()) as handle:
        assert trio.current_time() == 2
        assert (handle.pid, launcher.live) == (0, ["G1/0"])
        await handle.wait()
        assert trio.current_time() == 9
        assert await handle.read_output() == SessionOutput(reward=1.0, metadata={"a": 2})

    assert seen == [({"messages": [{"role": "user", "content": "hi"}], "metadata": {"n": 1}}, "rs-x", "client")]
    assert launcher.ended == [FakeEnd(place=PlaceId("G1/0"), at_s=12.0, exit_code=0, has_failed=False)]
    assert launcher.live == []


async def test_failing_exit_comes_out_bare_with_code_and_log(autojump_clock):
    async def agent(me):
        me.print("about to fail, with rs-x")
        raise AgentExit(-9)

    launcher = FakeAgentLauncher(agent)
    with pytest.raises(AgentExecutionError, match="session G1/0: the agent ended with signal 9") as caught:
        async with launcher.open(spec()) as handle:
            await handle.wait()

    assert caught.value.exit_code == -9
    assert caught.value.tail == "about to fail, with <session id>\n"
    assert launcher.ended[0].has_failed


async def test_broken_output_fails_as_with_a_real_agent(autojump_clock):
    async def agent(me):
        me.print("wrote it")
        me.output = b"[]"

    launcher = FakeAgentLauncher(agent)
    async with launcher.open(spec()) as handle:
        await handle.wait()
        with pytest.raises(AgentOutputError, match=r"record 1: a JSON array.*\nwrote it"):
            await handle.read_output()
    assert launcher.ended[0].has_failed


async def test_leaving_the_block_ends_an_agent_that_still_works(autojump_clock):
    async def agent(me):
        await trio.sleep_forever()

    launcher = FakeAgentLauncher(agent, end_s=5)
    with trio.move_on_after(10) as scope:
        async with launcher.open(spec()) as handle:
            await handle.wait()

    assert scope.cancelled_caught
    assert launcher.ended == [FakeEnd(place=PlaceId("G1/0"), at_s=15.0, exit_code=None, has_failed=False)]


async def test_cancelled_wait_leaves_the_agent_running(autojump_clock):
    async def agent(me):
        await trio.sleep(10)

    async with FakeAgentLauncher(agent).open(spec()) as handle:
        with trio.move_on_after(4):
            await handle.wait()
        await handle.wait()
        assert trio.current_time() == 10


async def test_launch_errors_come_in_the_order_they_were_given(autojump_clock):
    async def agent(me):
        pass

    launcher = FakeAgentLauncher(agent, launch_errors=["no room", None])
    with pytest.raises(AgentLaunchError, match="session G1/0: its agent could not be started: no room"):
        async with launcher.open(spec()):
            pass
    async with launcher.open(spec()) as handle:
        await handle.wait()
    assert launcher.started == ["G1/0"]


async def test_bug_in_the_agent_function_is_loud(autojump_clock):
    async def agent(me):
        raise ZeroDivisionError

    launcher = FakeAgentLauncher(agent)
    with pytest.RaisesGroup(ZeroDivisionError):
        async with launcher.open(spec()) as handle:
            await handle.wait()
    assert launcher.live == []


async def test_unknown_keys_are_warned_about_once_a_run(autojump_clock, events):
    async def agent(me):
        me.write_output({"scor": 1})

    launcher = FakeAgentLauncher(agent)
    for _ in range(2):
        async with launcher.open(spec()) as handle:
            await handle.wait()
            await handle.read_output()
    assert [e.fields for e in events if e.name == "output.unknown_key"] == [{"place": "G1/0", "key": "scor"}]
